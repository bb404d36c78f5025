"""Whole jobs over JSON Lines and CSV: the answers of the same rows in Parquet, exact resume, damaged lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import (
    InProcess,
    answered_rows,
    invoke,
    job_config,
    job_values,
    parts,
    run_and_read,
    run_in_process,
    run_interrupted,
)
from input_files import write_values

from pipeline import nightly
from pipeline.advise.try_rows import answer_first_rows
from pipeline.commit.verify import verify
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.plan import plan_files
from pipeline.storage.folder import open_folder

ROWS = [
    {"id": f"row-{row}", "prompt": " ".join(["alpha", "bravo", "cheap"][: 1 + row % 3]), "heat": row % 2 * 0.5}
    for row in range(20)
]
FEW = {"max_new_tokens": 4}


def config(path: Path, output: Path, checkpoint: Path, /, **changes: Any) -> JobConfig:
    source, sampling = ({**own, **changes.pop(name, {})} for name, own in (("input", {"id": "id"}), ("sampling", FEW)))
    return job_config(path, output, checkpoint, input=source, sampling=sampling, shard_rows=6, **changes)


def test_rows_in_any_format_have_the_same_answered_rows(tmp_path: Path, checkpoint: Path) -> None:
    """The CSV's ids and prompts are text, and its temperatures numbers, as in the other files."""
    found = {}
    for suffix in ("parquet", "jsonl", "jsonl.gz", "csv", "csv.gz"):
        path = tmp_path / f"in.{suffix}"
        write_values(path, [{**row, "heat": 0.0} for row in ROWS])
        job = config(path, tmp_path / suffix, checkpoint, input={"sampling": {"temperature": "heat"}})
        assert run_in_process(job).totals.errors == 0
        found[suffix] = answered_rows(tmp_path / suffix)
    assert [row["id"] for row in found["parquet"]] == [row["id"] for row in ROWS]
    assert all(rows == found["parquet"] for rows in found.values())


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "csv"])
def test_an_interrupted_and_resumed_job_writes_the_same_bytes(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Sampled answers: they depend on file and row number."""
    path = tmp_path / f"in.{suffix}"
    write_values(path, ROWS)
    changes: dict[str, Any] = {"sampling": {"max_new_tokens": 4, "temperature": 1.0}}
    run_in_process(config(path, tmp_path / "whole", checkpoint, **changes))
    killed = config(path, tmp_path / "killed", checkpoint, **changes)

    run_interrupted(monkeypatch, killed)
    before = len(answered_rows(tmp_path / "killed"))  # shards that were at work have ended
    assert 0 < before < len(ROWS) and not (tmp_path / "killed" / "_SUCCESS").exists()
    assert run_in_process(killed).fresh_rows == len(ROWS) - before
    assert parts(tmp_path / "killed") == parts(tmp_path / "whole")
    folder = open_folder(str(tmp_path / "killed"), StorageConfig())
    manifest = plan_files.load(folder)
    assert manifest is not None and list(verify(folder, manifest, StorageConfig())) == []


def test_a_damaged_line_is_its_rows_error(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[4], lines[9] = lines[4][:-3], b'{"id": "row-9"}'
    path.write_bytes(b"\n".join(lines))
    totals = run_in_process(config(path, tmp_path / "out", checkpoint)).totals
    assert (totals.rows, totals.errors) == (len(ROWS), 2)
    rows = answered_rows(tmp_path / "out")
    assert rows[4]["id"] is None and rows[4]["error"].startswith("not JSON: JSONDecodeError")
    assert rows[9]["error"] == "prompt is null"
    whole = tmp_path / "whole.jsonl"
    write_values(whole, ROWS)
    run_in_process(config(whole, tmp_path / "whole", checkpoint))
    others = [row for number, row in enumerate(answered_rows(tmp_path / "whole")) if number not in (4, 9)]
    assert others == [row for number, row in enumerate(rows) if number not in (4, 9)]


def test_a_deep_tree_of_comments_costs_its_row_only(tmp_path: Path, checkpoint: Path) -> None:
    def tree(depth: int) -> dict[str, Any]:
        return {"text": "x", "replies": [tree(depth - 1)] if depth else []}

    path = tmp_path / "in.jsonl"
    write_values(path, [{**row, "tree": tree(40 if row is ROWS[7] else 12)} for row in ROWS])
    source = {"template": "{{ prompt }} {{ tree.replies | length }}"}
    totals = run_in_process(config(path, tmp_path / "out", checkpoint, input=source, output={"keep": ["tree"]})).totals
    rows = answered_rows(tmp_path / "out")
    assert (totals.rows, totals.errors) == (len(ROWS), 1) and rows[7]["error"].startswith("column tree: ")
    assert rows[6]["tree"]["replies"][0]["text"] == "x"


def test_chats_and_sampling_may_differ_in_shape_from_row_to_row(tmp_path: Path, chat_checkpoint: Path) -> None:
    path = tmp_path / "in.jsonl"
    text = {"role": "user", "content": "alpha bravo"}
    parts_of_text = {"role": "user", "content": [{"type": "text", "text": "alpha bravo"}], "name": None}
    rows = [
        {"id": 1, "chat": [text], "own": {"max_new_tokens": 2}},
        {"id": 2, "chat": [parts_of_text], "own": {"stop": ["zzzz"], "max_new_tokens": 2}},
        {"id": 3, "chat": json.dumps([text]), "own": {"max_new_tokens": 0, "stop": None}},
    ]
    write_values(path, rows)
    job = config(path, tmp_path / "out", chat_checkpoint, input={"messages": "chat", "sampling": "own"})
    run_in_process(job)
    found = answered_rows(tmp_path / "out")
    assert found[0]["generated_text"] == found[1]["generated_text"] and found[0]["generated_tokens"] == 2
    assert [row["id"] for row in found] == [1, 2, 3]
    assert found[2]["error"] == "sampling: max_new_tokens = 0: must be 1 to 2147483647"


def test_a_schema_may_be_an_object_of_its_row(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "in.jsonl"
    schemas: list[Any] = [{"const": "a"}, {"enum": [["b", 1]]}, json.dumps({"const": "c"}), 5]
    write_values(path, [{"id": number, "prompt": "alpha", "form": schema} for number, schema in enumerate(schemas)])
    source = {"output_format": {"json_schema": "form"}}
    run_in_process(config(path, tmp_path / "out", checkpoint, input=source, sampling={"max_new_tokens": 20}))
    found = answered_rows(tmp_path / "out")
    assert [json.loads(row["generated_text"]) for row in found[:3]] == ["a", ["b", 1], "c"]
    assert found[3]["error"] == "json_schema: is a int; it must be an object"


def test_a_shared_prefix_is_found_and_try_shows_rows(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "in.jsonl"
    write_values(path, ROWS)
    rule = "Name the place, its area and its food in one line. {{ prompt }}"
    job = config(path, tmp_path / "out", checkpoint, input={"template": rule})
    assert run_in_process(job).totals.shared_prompt_tokens > 0
    with open(path, "ab") as file:
        file.write(b"x" * 2**28)  # too long a line, which no look at the first rows meets
    tried = answer_first_rows(job, 8)
    made = answered_rows(tmp_path / "out")[:8]
    assert [row.id for row in tried] == [row["id"] for row in made]
    assert [row.answers[0].generated_text for row in tried] == [row["generated_text"] for row in made]


def test_incremental_runs_answer_each_file_once(tmp_path: Path, checkpoint: Path) -> None:
    """JSON Lines in and out: a dated folder for each run, with its own answers.jsonl."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    section = {"format": "jsonl", "since": "last_success"}
    job = config(inbox, tmp_path / "root", checkpoint, input=section, output={"format": "jsonl"})
    for number, rows in enumerate((ROWS[:5], ROWS[5:8])):
        write_values(inbox / f"{number}.jsonl", rows)
        (run,) = nightly.run(job, backend=InProcess()).finished
        folder = tmp_path / "root" / run.run.folder
        found = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert [row["id"] for row in found] == [row["id"] for row in rows] and found == answered_rows(folder)
    assert nightly.run(job, backend=InProcess()).finished == []


def test_a_csv_column_of_parameters_is_kept_as_a_number_and_an_id_as_text(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "in.csv").write_text("id,prompt,n,e,s\n007,alpha,2.0,1,\n008,alpha,,True,x\n009,alpha, 3,0,\n")
    own = {"max_new_tokens": "n", "ignore_eos": "e", "stop": "s"}
    values = job_values(
        tmp_path / "in.csv",
        tmp_path / "out",
        checkpoint,
        input={"id": "id", "sampling": own},
        output={"keep": ["n"]},
        sampling={"max_new_tokens": 4},
    )
    rows = run_and_read(values)
    assert [(row["id"], row["n"], row["error"]) for row in rows] == [
        ("007", 2, None),
        ("008", None, None),
        ("009", 3, None),
    ]
    assert [row["generated_tokens"] for row in rows[:2]] == [2, 4]


def test_rows_that_cannot_be_read_keep_their_places_without_an_id(
    tmp_path: Path, checkpoint: Path, in_process: None, reports: None
) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "alpha"}\n{\n{"id": "b", "prompt": "b"}\nx\n')
    job = config(tmp_path / "in.jsonl", tmp_path / "out", checkpoint)
    assert run_in_process(job).totals.errors == 2
    answered = answered_rows(tmp_path / "out")
    assert [row["id"] for row in answered] == ["a", None, "b", None]
    for number in (1, 3):
        assert answered[number]["error"].startswith("not JSON: ")
        assert answered[number]["error"].endswith(f" (row {number} of 'in.jsonl', counted from 0)")
    again = invoke(tmp_path, job, "--show", "3").stdout
    assert "\n[no id]\n  error: not JSON: " in again and "[None]" not in again
    assert "nothing left to do: the output has 4 rows, 2 with an error\n" in again
    assert ">None<" not in (tmp_path / "out" / "_job" / "report.html").read_text()
