"""Ids that repeat across shards are counted over the whole job, with examples; `error` refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import invoke, job_values, report, run_in_process

from actors.engine.errors import UserError
from pipeline.commit import duplicates
from pipeline.commit.duplicates import count_repeated
from pipeline.config.job import JobConfig
from pipeline.input.shards import Shard


def counted(columns: list[pa.ChunkedArray]) -> tuple[int, list[str]]:
    shards = [Shard(index, f"f{index}", 10, len(column)) for index, column in enumerate(columns)]
    return count_repeated(columns, shards, lambda shard: columns[shard.index])


def test_two_texts_with_one_hash_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "hash", lambda text: 7, raising=False)
    assert counted([pa.chunked_array([["a", "b"]])]) == (0, [])


IDS = st.lists(st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=6), max_size=5)


@given(IDS, st.sampled_from([pa.int64(), pa.string(), pa.timestamp("ms"), pa.list_(pa.int64())]), st.integers(1, 9))
def test_rows_are_counted_as_a_set_would(ids: list[list[Any]], kind: pa.DataType, at_once: int) -> None:
    values = [
        [
            None if one is None else [one] if pa.types.is_list(kind) else str(one) if kind == pa.string() else one
            for one in shard
        ]
        for shard in ids
    ]
    columns = [pa.chunked_array([pa.array(shard, kind)]) for shard in values]
    every = [str(one) for shard in ids for one in shard if one is not None]
    before, duplicates.ROWS_AT_ONCE = duplicates.ROWS_AT_ONCE, at_once
    try:
        found, examples = counted(columns)
    finally:
        duplicates.ROWS_AT_ONCE = before
    assert found == len(every) - len(set(every)) and len(examples) == min(found, 3)


def test_an_example_names_both_rows() -> None:
    columns = [pa.chunked_array([["a", "b"]]), pa.chunked_array([["c", "b", "d"]])]
    assert counted(columns) == (1, ["'b': row 11 of f0 and row 11 of f1"])


@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [
        (pa.binary(16), b"\xff" * 16, b"\xfe" * 16),  # a UUID of Parquet
        (pa.timestamp("us", "Nowhere/Here"), 1, 2),
        (pa.timestamp("s"), 2**40, 2**40 + 1),  # after the year 9999
    ],
)
def test_ids_that_are_no_text_are_counted_too(kind: pa.DataType, one: Any, two: Any) -> None:
    found, examples = counted([pa.chunked_array([pa.array([one, two, one], kind)])])
    assert found == 1 and examples[0].endswith("row 10 of f0 and row 12 of f0")


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """Two files of three rows; one id of the second is in the first."""
    (tmp_path / "in").mkdir()
    for number, ids in enumerate((["a", "b", "c"], ["d", "b", "e"])):
        pq.write_table(pa.table({"id": ids, "prompt": ["alpha"] * 3}), tmp_path / "in" / f"{number}.parquet")
    sampling = {"max_new_tokens": 2, "n": 2, "temperature": 1.0}
    return job_values(tmp_path / "in", tmp_path / "out", checkpoint, input={"id": "id"}, sampling=sampling)


def test_a_job_says_how_many_rows_repeat_an_id_of_another_shard(
    values: dict[str, Any], tmp_path: Path, in_process: None, reports: None
) -> None:
    done = invoke(tmp_path, values)
    files = [f"{tmp_path}/in/{number}.parquet" for number in range(2)]
    example = f"'b': row 1 of {files[0]} and row 1 of {files[1]}"
    assert done.exit_code == 0, done.output
    assert f"warning: 1 row with the id of an earlier row\n  {example}\n" in done.stdout
    summary = json.loads((tmp_path / "out" / "_job" / "summary.json").read_text())
    assert (summary["duplicate_ids"], summary["duplicate_examples"]) == (1, [example])
    assert example.replace("'", "&#39;") in (tmp_path / "out" / "_job" / "report.html").read_text()
    assert example in report(tmp_path / "out").stdout
    assert run_in_process(JobConfig.model_validate(values)).totals.duplicate_ids == 1  # finished
    values["input"]["duplicate_ids"] = "error"
    with pytest.raises(UserError, match=r"^input\.id: 1 row with the id of an earlier row"):
        run_in_process(JobConfig.model_validate(values))


def test_error_refuses_before_anything_is_written(values: dict[str, Any], tmp_path: Path) -> None:
    values["input"]["duplicate_ids"] = "error"
    with pytest.raises(UserError, match=r"^input\.id: 1 row with the id of an earlier row, such as 'b': row 1 of "):
        run_in_process(JobConfig.model_validate(values))
    assert not (tmp_path / "out").exists()


def test_rows_that_cannot_be_read_repeat_no_id_and_say_where_they_are(
    values: dict[str, Any], tmp_path: Path, in_process: None, reports: None
) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "alpha"}\n{\n{"id": "b", "prompt": "b"}\nx\n')
    values["input"] |= {"path": str(tmp_path / "in.jsonl"), "duplicate_ids": "error"}
    result = run_in_process(JobConfig.model_validate({**values, "shard_rows": 2}))
    assert (result.totals.errors, result.totals.duplicate_ids) == (2, 0)
    answered = [row for row in pq.read_table(tmp_path / "out").to_pylist() if row["sample_index"] == 0]
    assert [row["id"] for row in answered] == ["a", None, "b", None]
    for number in (1, 3):
        assert answered[number]["error"].startswith("not JSON: ")
        assert answered[number]["error"].endswith(f" (row {number} of 'in.jsonl', counted from 0)")
    again = invoke(tmp_path, {**values, "shard_rows": 2}, "--show", "3").stdout
    assert "\n[no id]\n  error: not JSON: " in again and "[None]" not in again
    assert "nothing left to do: the output has 4 rows, 2 with an error\n" in again
    assert ">None<" not in (tmp_path / "out" / "_job" / "report.html").read_text()


def test_error_refuses_text_input_at_the_end_without_success(values: dict[str, Any], tmp_path: Path) -> None:
    lines = [json.dumps({"id": one, "prompt": "alpha"}) for one in "abcdb"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    values["input"] |= {"path": str(tmp_path / "in.jsonl"), "duplicate_ids": "error"}
    with pytest.raises(UserError, match=r"^input\.id: 1 row with the id of an earlier row"):
        run_in_process(JobConfig.model_validate({**values, "shard_rows": 2}))
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 3 and not (tmp_path / "out" / "_SUCCESS").exists()
