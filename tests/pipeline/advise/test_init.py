"""`skipdecode init`: the job file that it writes from an input is one that `try` answers."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.advise.propose import job_text, propose, write_job_file
from pipeline.checkpoints.resolve import PLACEHOLDER, resolve_checkpoint
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config, parse_yaml, validated
from pipeline.plan.inputs import check_output_disjoint

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def written(folder: Path, *arguments: str) -> tuple[Result, Path]:
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
    assert "row_id, question, other" in done.stdout and f"skipdecode try {job}" in done.stdout
    for command in ("try", "plan", "run"):
        assert f"# skipdecode {command} {job} " in job.read_text()
    config = load_config(JobConfig, job)
    assert (config.input.id, config.input.prompt, config.model.path) == ("row_id", "question", str(checkpoint))
    tried = CliRunner().invoke(
        app, ["try", str(job), "--rows", "2", "--set", "sampling.max_new_tokens=4", "--set", "model.dtype=float32"]
    )  # fmt: skip
    assert tried.exit_code == 0, tried.output
    assert "[r0]" in tried.stdout and "answer:" in tried.stdout


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_model_with_a_chat_template_gets_chats(tmp_path: Path, checkpoint: Path, place: str) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    config = json.loads((model / "tokenizer_config.json").read_text())
    text = template if place.endswith("jinja") else json.dumps({**config, "chat_template": template})
    (model / place).write_text(text)
    pq.write_table(pa.table({"text": ["cheap pub", "riverside"]}), tmp_path / "in.parquet")
    done, job = written(tmp_path, str(tmp_path / "in.parquet"), "--model", str(model))
    assert done.exit_code == 0, done.output
    assert load_config(JobConfig, job).input.chat
    options = ["--set", "sampling.max_new_tokens=2", "--set", "schedule.speedup=1"]
    tried = CliRunner().invoke(app, ["try", str(job), "--rows", "1", *options])
    assert tried.exit_code == 0, tried.output


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"Comment": pa.string(), "Prompt": pa.large_string()}, {"prompt": "Prompt"}),
        ({"id": pa.int64(), "prompt": pa.string()}, {"id": "id", "prompt": "prompt"}),
        ({"user_id": pa.string(), "text": pa.string()}, {"prompt": "user_id"}),  # the first text
        ({"uuid": pa.string(), "body": pa.dictionary(pa.int8(), pa.string())}, {"id": "uuid", "prompt": "body"}),
        ({"text": pa.string(), "id": pa.int64(), "turns": CHAT}, {"id": "id", "messages": "turns"}),
        ({"text": pa.string(), "chat": pa.string()}, {"messages": "chat"}),  # JSON
        ({"ids": pa.list_(pa.int32()), "text": pa.string()}, {"prompt": "ids"}),
        (dict.fromkeys(("custom_id", "method", "url", "body"), pa.string()), {"format": "openai_batch"}),
    ],
)
def test_columns_have_their_roles(columns: dict[str, pa.DataType], keys: dict[str, Any]) -> None:
    assert propose(pa.schema(columns.items())) == keys


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("in.jsonl", '{"id": 1, "score": 0.5}\n', "score"),
        ("missing", None, "no such file"),
        ("bad.jsonl", "{\n", "none holds a JSON object"),
        ("empty.csv", "", "is empty"),
        ("script.py", "import csv, json\nprint(csv, json)\n", "set input.format"),
        ("in.csv", "id,prompt\n1,a\n", "and is kept"),
    ],
)
def test_an_input_without_prompts_is_refused_in_one_line_and_no_file_is_replaced(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    if words == "and is kept":
        (tmp_path / "job.yaml").write_text("mine")
    before = sorted(tmp_path.iterdir())
    done, job = written(tmp_path, str(tmp_path / name))
    assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before and (job not in before or job.read_text() == "mine")


def test_a_folder_of_json_lines_has_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)  # where there is no demo checkpoint
    write_job_file(str(tmp_path / "in"), tmp_path / "job.yaml")
    config = load_config(JobConfig, tmp_path / "job.yaml")
    assert config.input.format == "jsonl" and config.model.path == PLACEHOLDER
    with pytest.raises(UserError, match=r"model\.path: owner/name@revision is an example: replace it"):
        resolve_checkpoint(config.model, config.storage)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
def test_any_names_of_columns_make_a_valid_file(columns: list[str]) -> None:
    try:
        keys = propose(pa.schema([(name, pa.string()) for name in columns]))
    except UserError:
        return
    text = job_text({"path": "in.parquet", **keys}, columns, Path("job.yaml"), "m", "answers")
    config = validated(JobConfig, parse_yaml(text), "job.yaml")
    assert config.input.prompt in (None, *columns)


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
    text = job_text({"path": path, "prompt": "prompt"}, ["prompt"], Path("job.yaml"), PLACEHOLDER, "answers")
    assert parse_yaml(text)["output"]["path"] == str(Path.cwd() / "answers" / name)


@pytest.mark.parametrize("path", [".", "answers"])
def test_the_output_lies_outside_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    folder = tmp_path / "data"
    (folder / path).mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["say hi"]}), folder / path / "a.parquet")
    monkeypatch.chdir(folder)
    write_job_file(path, Path("job.yaml"))
    config = load_config(JobConfig, "job.yaml")
    check_output_disjoint(config)
    assert Path(config.output.path).resolve().parent == tmp_path / "answers"
