"""`skipdecode init`: the job file that it writes from an input is one that `try` answers."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.advise.propose import Sample, job_text, propose, true_answers, write_job_file
from pipeline.checkpoints.resolve import PLACEHOLDER, resolve_checkpoint
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config, parse_yaml, validated
from pipeline.plan.inputs import check_output_disjoint


def written(folder: Path, *arguments: str) -> tuple[Any, Path]:
    job = folder / "job.yaml"
    return CliRunner().invoke(app, ["init", *arguments, "--output", str(job)]), job


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "csv"])
def test_try_answers_the_job_that_init_writes(tmp_path: Path, checkpoint: Path, suffix: str) -> None:
    rows = [{"row_id": f"r{row}", "question": f"cheap pub {row}", "other": "x"} for row in range(6)]
    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    done, job = written(tmp_path, str(path), "--model", str(checkpoint))
    assert done.exit_code == 0, done.output
    assert "row_id" in done.stdout and "question holds the prompts" in done.stdout
    config = load_config(JobConfig, job)
    assert (config.input.id, config.input.prompt) == ("row_id", "question")
    tried = CliRunner().invoke(
        app, ["try", str(job), "--rows", "2", "--set", "sampling.max_new_tokens=4", "--set", "model.dtype=float32"]
    )  # fmt: skip
    assert tried.exit_code == 0, tried.output
    assert "[r0]" in tried.stdout and "answer:" in tried.stdout


@pytest.mark.parametrize("takes_system", [True, False])
def test_a_model_with_a_chat_template_gets_a_chat_and_a_system_message_that_it_takes(
    tmp_path: Path, checkpoint: Path, takes_system: bool
) -> None:
    """Some templates, such as Gemma 2's, refuse that role."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template if takes_system else refusal + template)
    pq.write_table(pa.table({"text": ["cheap pub", "riverside"]}), tmp_path / "in.parquet")
    done, job = written(tmp_path, str(tmp_path / "in.parquet"), "--model", str(model))
    assert done.exit_code == 0, done.output
    config = load_config(JobConfig, job)
    assert config.input.chat and (config.input.system is not None) == takes_system
    assert config.input.template is not None and config.input.template.endswith("{{ text }}")
    changes = ["sampling.max_new_tokens=2", "schedule.speedup=1", *(["input.system=a"] if takes_system else [])]
    options = [part for change in changes for part in ("--set", change)]  # the proposed message is long for this model
    tried = CliRunner().invoke(app, ["try", str(job), "--rows", "1", *options])
    assert tried.exit_code == 0, tried.output


def test_no_file_is_replaced(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in.parquet")
    (tmp_path / "job.yaml").write_text("mine")
    done, job = written(tmp_path, str(tmp_path / "in.parquet"))
    assert done.exit_code == 2 and "and is kept" in done.stderr and len(done.stderr.splitlines()) == 1
    assert job.read_text() == "mine"


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"Comment": ["a", "b"], "Prompt": ["x", "y"]}, {"prompt": "Prompt"}),
        ({"id": [1, 2], "prompt": ["a", "b"]}, {"id": "id", "prompt": "prompt"}),
        ({"id": [1, 1], "prompt": ["a", "b"]}, {"prompt": "prompt"}),
        ({"user_id": ["x", "y"], "text": ["a", "b"]}, {"id": "user_id", "template": None}),
        (
            {"instruction": ["a"], "input": ["b"]},
            {"template": "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}"},
        ),
        ({"id": [1], "messages": [[{"role": "user", "content": "a"}]]}, {"id": "id", "messages": "messages"}),
        ({"chat": ['[{"role": "user", "content": "a"}]', None]}, {"messages": "chat"}),
        ({"ids": [[1, 2], [3]]}, {"prompt": "ids"}),
        ({"the text": ["long enough", None]}, {"prompt": "the text"}),
        ({"range": ["long enough", None]}, {"prompt": "range"}),
        ({name: ["a"] for name in ("custom_id", "method", "url", "body")}, {"format": "openai_batch"}),
    ],
)
def test_columns_have_their_roles(columns: dict[str, list[Any]], keys: dict[str, Any]) -> None:
    found = propose(columns).keys
    assert set(found) == set(keys)
    assert all(found[name] == value for name, value in keys.items() if value is not None)


def test_ids_are_sought_only_in_columns_with_usual_names() -> None:
    note = propose({"ticket": [1, 2], "prompt": ["a", "b"]}).notes[0]
    assert note.startswith("No column with a usual name for ids (id, uuid, ")


def test_an_input_without_prompts_is_refused_in_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "score": [0.5, 1.0]}), tmp_path / "in.parquet")
    done, job = written(tmp_path, str(tmp_path / "in.parquet"))
    assert done.exit_code == 2 and "score" in done.stderr and not job.exists()
    (tmp_path / "in.csv").write_text("id,prompt\n")
    done, _ = written(tmp_path, str(tmp_path / "in.csv"))
    assert done.exit_code == 2 and done.stderr.endswith("/in.csv: holds no rows\n")
    done, _ = written(tmp_path, str(tmp_path / "missing"))
    assert done.exit_code == 2 and "no such file" in done.stderr
    (tmp_path / "bad.jsonl").write_text("{\n")
    done, _ = written(tmp_path, str(tmp_path / "bad.jsonl"))
    assert done.exit_code == 2 and "none holds a JSON object; write one per line" in done.stderr


def test_a_folder_of_json_lines_has_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)  # where there is no demo checkpoint
    sample, _ = write_job_file(str(tmp_path / "in"), tmp_path / "job.yaml")
    config = load_config(JobConfig, tmp_path / "job.yaml")
    assert sample.files == 1 and config.input.format == "jsonl" and config.model.path == PLACEHOLDER
    with pytest.raises(UserError, match=r"model\.path: owner/name@revision is an example: replace it"):
        resolve_checkpoint(config.model, config.storage)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.text(), min_size=2, max_size=2), min_size=1, max_size=4))
def test_any_names_of_columns_make_a_valid_file(columns: dict[str, list[str]]) -> None:
    try:
        proposal = propose(columns)
    except UserError:
        return
    text = job_text("in.parquet", Sample(1, None, dict(columns)), proposal, "m")
    config = validated(JobConfig, parse_yaml(text), "job.yaml")
    assert config.input.prompt in (None, *columns)


def test_a_column_of_few_values_becomes_choices_in_a_comment() -> None:
    columns = {
        "id": list(range(12)),
        "text": [f"ticket {row}" for row in range(12)],
        "truth": ["C#", "a: b", "C#"] * 4,
    }
    found = propose(columns)
    assert found.labels == ("C#", "a: b")
    text = job_text("in.csv", Sample(1, None, columns), found, PLACEHOLDER)
    assert parse_yaml(re.sub(r"^# (?=choices:|- )", "", text, flags=re.M))["choices"] == ["C#", "a: b"]
    assert propose({**columns, "truth": [f"word {row % 6}" for row in range(12)]}).labels == ()


def test_a_column_is_not_taken_for_one_whose_name_contains_its_name() -> None:
    columns = {"labelled_text": [f"song {row}" for row in range(12)], "label": ["C", "D"] * 6}
    assert propose(columns).labels == ("C", "D")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/*.parquet", "data"),
        ("data/**/*.jsonl", "data"),
        ("s3://bucket/part-?.parquet", "part-"),
        ("data/[ab].csv", "ab"),
        ("data/in.jsonl.gz", "in"),
        ("data/", "data"),
        ("*.parquet", "cwd"),
    ],
)
def test_the_output_is_named_after_the_input_without_the_globs_characters(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    columns = {"prompt": ["a", "b"]}
    text = job_text(path, Sample(1, None, dict(columns)), propose(columns), PLACEHOLDER)
    assert parse_yaml(text)["output"]["path"] == str(Path.cwd() / "answers" / name)


@pytest.mark.parametrize("path", [".", "answers"])
def test_the_output_lies_outside_of_the_input_and_empty_files_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    folder = tmp_path / "data"
    (folder / path).mkdir(parents=True)
    rows = {"instruction": ["translate", "say hi"], "input": ["ja", None]}
    empty = pa.table(rows).slice(0, 0)
    for name, table in (("a.parquet", empty), ("b.parquet", pa.table(rows))):
        pq.write_table(table, folder / path / name)
    monkeypatch.chdir(folder)
    write_job_file(path, Path("job.yaml"))
    config = load_config(JobConfig, "job.yaml")
    check_output_disjoint(config)
    assert Path(config.output.path).resolve().parent == tmp_path / "answers"
    template = Environment().from_string(config.input.template or "")
    assert [template.render(instruction="do", input=text) for text in ("it", None)] == ["do\n\nit", "do"]


def test_a_column_of_true_answers_is_named_for_adapt() -> None:
    columns = {"text": ["long enough", "and more"], "Label": ["x", "y"]}
    text = job_text("in.csv", Sample(1, None, columns), propose(columns), PLACEHOLDER)
    assert parse_yaml(text.replace("# adapt:", "adapt:"))["adapt"] == {"references": "Label"}
    assert true_answers({"other": ["X ", None], "label": ["z", "x"]}, ["x", "y"]) == "other"
    assert true_answers({"other": ["x"], "label": [1]}) is None
