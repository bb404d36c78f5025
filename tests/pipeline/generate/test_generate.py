"""The actor, without Ray around it, and the statistics of its shards."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from part_builders import LAYERS, Commits, part_spec, shard_batch, shard_generator
from prompt_specs import spec_of

from actors.answers import Answer
from actors.generator import Generator, RowsAtWork
from pipeline.commit.records import commit_record, decode_record, encode_record
from pipeline.generate import stage as generate
from pipeline.generate.coordinator import Coordinator
from pipeline.generate.stats import KINDS, ShardStats, error_kinds, kind_of
from pipeline.prepare.prompts import prepare_table


def test_a_model_is_loaded_and_run_in_one_thread(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread asks: OpenMP's threads of two callers get in each other's way."""
    seen: list[int] = []

    class Watched(Generator):
        def __init__(self, *args: Any, **settings: Any) -> None:
            seen.append(threading.get_ident())
            super().__init__(*args, **settings)

        def run(self, work: RowsAtWork) -> None:
            seen.append(threading.get_ident())
            super().run(work)

    monkeypatch.setattr(generate, "Generator", Watched)
    with ThreadPoolExecutor(1) as other:
        other.submit(committed, checkpoint).result()
    assert len(seen) == 2 and len(set(seen)) == 1


SETTINGS = {"dtype": "float32", "device": "cpu", "sampling": {"max_new_tokens": 4}}
DATES = pa.array([20_000, 2**31 - 1, -(2**31)], pa.date32())  # years 2024, 5,881,580 and -5,877,641


def committed(checkpoint: Path, how: Mapping[str, Any] = MappingProxyType({}), **columns: Any) -> Commits:
    """A shard of three rows, the second with an error, answered and committed."""
    rows = pa.table({"prompt": ["alpha", None, "beta"], "id": ["a", "b", "c"], **columns})
    commits, prepared = Commits(), prepare_table(rows, spec_of(checkpoint))
    actor = shard_generator({"checkpoint": str(checkpoint), **SETTINGS}, part_spec(), commits, **how)
    actor(shard_batch(3, prepared, first_row=30))
    return commits


def test_an_actor_shows_an_answer_with_the_end_of_its_prompt(checkpoint: Path) -> None:
    """So that a wrong template is seen while the job runs."""
    coordinator = Coordinator()
    committed(checkpoint, {"coordinator": coordinator})
    prompt, answer = coordinator.read().example.split(" -> ")
    assert prompt.startswith("…") and "alpha" in prompt and answer


@pytest.mark.parametrize("rows", [[0, 2], [0, 0, 2], [2, 1, 0]], ids=["without", "twice", "out of order"])
def test_a_part_that_lacks_a_row_is_not_committed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    finish = Generator.finish

    def wrong(self: Generator, work: RowsAtWork) -> list[Answer]:
        answers = finish(self, work)
        return [answers[row] for row in rows]

    monkeypatch.setattr(Generator, "finish", wrong)
    with pytest.raises(RuntimeError, match=r"^part-000003.parquet \(in/a.parquet from row 30\) is not committed\. Of "):
        committed(checkpoint)


def test_a_date_that_python_cannot_hold_fails_no_shard(checkpoint: Path) -> None:
    """As the id of a row with an error, which the statistics quote; neither here nor when a record is rebuilt."""
    commits = committed(checkpoint, id=DATES)
    table = pq.read_table(io.BytesIO(commits.parts[3]))
    assert table["id"].combine_chunks() == DATES
    for stats in (commits.stats[3], ShardStats.of_part(3, table, LAYERS)):
        assert (stats.rows, stats.errors) == (3, 1)
        assert stats.error_kinds == '[["prompt is null", 1, "?", "prompt is null"]]'


@pytest.mark.parametrize("figure", ["error_kinds", "label_counts", "count_answers", "duplicate_ids"])
def test_a_figure_that_cannot_be_had_costs_no_shard(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, figure: str
) -> None:
    def broken(*_: Any) -> Any:
        raise OverflowError("date value out of range")

    monkeypatch.setattr(f"pipeline.generate.stats.{figure}", broken)
    stats = committed(checkpoint).stats[3]
    assert (stats.rows, stats.errors, stats.generated_tokens > 0) == (3, 1, True)
    assert "shard 3: no statistic " in caplog.text and "date value out of range" in caplog.text


@pytest.mark.parametrize("bytes_", [-1, 2**63, math.nan, "many", None])
def test_a_measured_value_that_no_record_can_hold_is_left_out(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, bytes_: Any
) -> None:
    monkeypatch.setattr(Generator, "peak_memory_bytes", lambda self: bytes_)
    monkeypatch.setattr(Generator, "device_name", lambda self: 1 / 0)
    commits = committed(checkpoint)
    stats = commits.stats[3]
    assert (stats.peak_memory_bytes, stats.device) == (0, "") and stats.rows == 3
    record = decode_record(encode_record(commit_record(commits.parts[3], stats), "f"), 3, "f")
    assert record == commit_record(commits.parts[3], stats)


def test_numbers_and_quoted_texts_do_not_make_another_kind() -> None:
    assert kind_of("prompt of 9,003 tokens leaves no room in a context of 512") == kind_of(
        "prompt of 7 tokens leaves no room in a context of 4096"
    )
    assert kind_of("label 'a' twice") == kind_of("label 'b' twice") != kind_of("label twice")


def test_the_most_frequent_kinds_are_named_and_the_rest_counted() -> None:
    errors = ["a 1", "a 2", None, "b", "b", "b", "c", "c", "d", "e"]
    part = pa.table({"id": [f"row-{place}" for place in range(len(errors))], "error": errors})
    kinds = json.loads(error_kinds(part))
    assert kinds == [
        ["b", 3, "row-3", "b"],
        ["a …", 2, "row-0", "a 1"],
        ["c", 2, "row-6", "c"],
        ["", 2, "", ""],
    ]
    assert len(kinds) == KINDS + 1
    assert error_kinds(part.slice(2, 1)) == ""
