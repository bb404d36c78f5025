"""Answers in a given form through whole jobs: one form for all rows, a form for each row, refusals at the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
from in_process import job_values, run_and_read, run_in_process

from actors.engine.errors import UserError
from pipeline.config.job import JobConfig

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["river", "city", "pub"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["place", "stars"],
    "additionalProperties": False,
}
REGEXES = ["[a-c]{2}", "(yes|no)", None, "(?=a)b", "[a-c]{2}", "(yes|no)", "", "(?=a)b"]  # an empty cell of a CSV is ""


def values(folder: Path, checkpoint: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    prompts = [f"name[Zizzi], food[{row}]" for row in range(8)]
    pq.write_table(pa.table({"prompt": prompts, "form": REGEXES}), folder / "in.parquet")
    own = {"schedule": {"speedup": 2}, "sampling": {"max_new_tokens": 36, "temperature": 1.0}}
    own |= {"output": {"strip": False}}
    return job_values(folder / "in.parquet", folder / "out", checkpoint, **{**own, **changes})


def test_every_answer_of_a_job_fits_its_schema(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    job = values(tmp_path, checkpoint, output_format={"json_schema": str(tmp_path / "schema.json")})
    rows = run_and_read(job)
    assert len(rows) == 8
    for row in rows:  # the longest text has 34 bytes
        jsonschema.validate(json.loads(row["generated_text"]), SCHEMA)
        assert row["finish_reason"] == "stop" and row["error"] is None


def test_answers_that_are_cut_off_keep_their_text_in_every_sample(tmp_path: Path, checkpoint: Path) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 1.0, "n": 2}
    job = values(tmp_path, checkpoint, output_format={"json_schema": SCHEMA}, sampling=sampling)
    result = run_in_process(JobConfig.model_validate(job))
    assert (result.totals.errors, result.totals.answers) == (8, 16)
    rows = pq.read_table(job["output"]["path"]).to_pylist()
    assert [row["sample_index"] for row in rows] == [0, 1] * 8
    assert result.totals.prompt_tokens == sum(row["prompt_tokens"] for row in rows) / 2 > 0
    for row in rows:
        assert row["generated_tokens"] == 5 and row["finish_reason"] == "length"
        assert row["error"] == "json_schema: the answer was cut off after 5 tokens: raise max_new_tokens"
        assert row["generated_text"]


def test_each_row_has_a_form_of_its_own_or_the_jobs(tmp_path: Path, checkpoint: Path) -> None:
    job = values(tmp_path, checkpoint, output_format={"grammar": 'start: "all " /[x-z]/'})
    job["input"]["output_format"] = {"regex": "form"}
    rows = run_and_read(job)
    for row, pattern in zip(rows, REGEXES, strict=True):
        if pattern == REGEXES[3]:
            assert "look-around" in row["error"] and row["generated_text"] is None
        else:
            assert row["error"] is None
            assert regex.fullmatch(pattern or "all [x-z]", row["generated_text"])
    alone = values(tmp_path / "alone", checkpoint)
    alone["input"]["output_format"] = {"regex": "form"}
    assert run_and_read(alone)[2]["error"] == "output_format: regex is null"


def test_a_keyword_of_a_rows_own_schema_that_no_grammar_holds_is_the_rows_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    unique = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    job = values(tmp_path, checkpoint, output_format={"json_schema": {"enum": [7]}})
    table = pq.read_table(job["input"]["path"]).drop_columns(["form"])
    forms = [json.dumps(unique) if row else None for row in range(len(table))]
    pq.write_table(table.append_column("form", [forms]), job["input"]["path"])
    job["input"]["output_format"] = {"json_schema": "form"}
    first, *rows = run_and_read(job)
    assert first["generated_text"] == "7" and first["error"] is None
    assert all("Unimplemented keys" in row["error"] and "uniqueItems" in row["error"] for row in rows)


def test_thinking_is_a_column_before_the_answer(tmp_path: Path, checkpoint: Path) -> None:
    """The tiny model ends its thinking with a letter, which comes by chance."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    marks = {"start": "[", "end": "e"}
    job = values(tmp_path, checkpoint, output_format={"json_schema": schema}, reasoning=marks)
    job["output"]["strip"] = True
    for row in run_and_read(job):
        assert row["reasoning"] is not None and "e" not in row["reasoning"]
        if row["error"] is None:
            assert json.loads(row["generated_text"])["a"] in ("x", "y")
        else:
            assert "cut off" in row["error"]


def test_another_form_is_another_job(tmp_path: Path, checkpoint: Path) -> None:
    run_and_read(values(tmp_path, checkpoint, output_format={"regex": "[a-c]"}))
    with pytest.raises(UserError, match="output_format"):
        run_and_read(values(tmp_path, checkpoint, output_format={"regex": "[a-d]"}))
