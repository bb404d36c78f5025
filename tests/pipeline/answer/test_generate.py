"""The actor, without Ray around it: statistics of its shards, and both stages after a row has killed their process."""

from __future__ import annotations

import io
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_files import stage_input
from memory_folder import MemoryFolder
from part_builders import LAYERS, Commits, part_spec, shard_batch, shard_generator
from poison_stages import KILLER
from prompt_specs import spec_of

from actors.answers import Answer
from actors.engine import scheduler
from actors.engine.engine import Engine
from actors.generator import Generator, RowsAtWork
from pipeline.answer import stage as generate
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.stats import KINDS, ShardStats, error_kinds, kind_of
from pipeline.commit.records import commit_record, decode_record, encode_record
from pipeline.input.rows import from_ipc
from pipeline.prepare import prompts as prepares
from pipeline.prepare import stage as prepare_stage
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ADDED, ERROR, prepare_table
from pipeline.prepare.stage import prepare
from pipeline.runtime.quarantine import Quarantine, ShardLost


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


@pytest.mark.parametrize("figure", ["error_kinds", "label_counts", "count_answers"])
def test_a_figure_that_cannot_be_had_costs_no_shard(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, figure: str
) -> None:
    def broken(*_: Any) -> Any:
        raise OverflowError("date value out of range")

    monkeypatch.setattr(f"pipeline.answer.stats.{figure}", broken)
    stats = committed(checkpoint).stats[3]
    assert (stats.rows, stats.errors, stats.generated_tokens > 0) == (3, 1, True)
    assert "shard 3: statistic " in caplog.text and "date value out of range" in caplog.text


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
    assert kind_of("not JSON: x (row 17 of 'in.jsonl', counted from 0)") == "not JSON: x"  # progress has few characters


def test_the_most_frequent_kinds_are_named_and_the_rest_counted() -> None:
    errors = ["a 1", "a 2", None, "b", "b", "b", "c", "c", "d", "e"]
    part = pa.table({"id": [None if place == 3 else f"row-{place}" for place in range(len(errors))], "error": errors})
    kinds = json.loads(error_kinds(part))
    assert kinds == [
        ["b", 3, "", "b"],
        ["a …", 2, "row-0", "a 1"],
        ["c", 2, "row-6", "c"],
        ["", 2, "", ""],
    ]
    assert len(kinds) == KINDS + 1
    assert error_kinds(part.slice(2, 1)) == ""


ROWS, POISON = 21, {4, 13}
GIVEN_UP = "the process died 2 times while it worked on this row alone"


class Death(BaseException):
    """The process is no more."""


def in_processes(call: Callable[[], Any], killers: int = len(POISON)) -> Any:
    """What the call returns. Each death costs one process: one finds out, then three for each row that kills."""
    for _ in range(1 + killers * (1 + 2)):
        with suppress(Death):
            return call()
    return call()


@pytest.fixture
def spec(checkpoint: Path) -> PromptSpec:
    return spec_of(checkpoint)


def table() -> pa.Table:
    prompts: list[str | None] = [" ".join(["cheap"] * (1 + row % 4)) for row in range(ROWS)]
    prompts[8] = None
    for row in POISON:
        prompts[row] = f"food {KILLER}"
    return pa.table({"id": [f"row-{row}" for row in range(ROWS)], "prompt": prompts})


def test_prepare_gives_up_only_the_rows_that_kill(
    spec: PromptSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards of a task: each death begins the task anew, and is no death of a shard that was prepared before."""
    want = prepare_table(table(), spec)
    tokenize = prepares.tokenize

    def deadly(checkpoint: Any, texts: Sequence[str], special_tokens: bool) -> Any:
        if any(KILLER in text for text in texts):
            raise Death
        return tokenize(checkpoint, texts, special_tokens)

    monkeypatch.setattr(prepares, "tokenize", deadly)
    quarantine = Quarantine(MemoryFolder(), "run", 2, "prepare")
    given = stage_input(tmp_path / "in.parquet", table(), table(), first=3)
    blocks = in_processes(lambda: list(prepare(**given, spec=spec, quarantine=quarantine)), killers=2 * len(POISON))
    healthy = [row for row in range(ROWS) if row not in POISON]
    for block in blocks:
        got = from_ipc(block["rows"][0].as_py())
        assert got.schema == want.schema
        assert got.take(healthy).to_pylist() == want.take(healthy).to_pylist()
        for row in got.take(sorted(POISON)).to_pylist():
            assert [row[name] for name in ADDED if name != ERROR] == [[], *[None] * (len(ADDED) - 2)]
            assert row[ERROR] == GIVEN_UP
    # until the shards are committed
    assert quarantine.folder.names("_job/quarantine") == ["000003.prepare.json", "000004.prepare.json"]


def test_a_death_while_a_shard_is_read_fails_the_shard(
    spec: PromptSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(*_: Any) -> Iterator[Any]:
        raise Death
        yield

    monkeypatch.setattr(prepare_stage, "read_shards", deadly)
    given = stage_input(tmp_path / "in.parquet", table())
    quarantine = Quarantine(MemoryFolder(), "run", 2, "prepare")
    with pytest.raises(ShardLost, match="shard 0: its process died 2 times"):
        in_processes(lambda: list(prepare(**given, spec=spec, quarantine=quarantine)))


@pytest.mark.parametrize("samples", [1, 2])
def test_generate_gives_up_only_the_rows_that_kill(
    spec: PromptSpec, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """Groups of rows share the prefixes that the whole shard shares."""
    for name in ("LEAST_TOKENS", "LEAST_LONGER", "LEAST_SAVED"):
        monkeypatch.setattr(scheduler, name, 1)
    prepared = prepare_table(table(), spec)
    given = shard_batch(3, prepared)
    settings = {
        "checkpoint": str(checkpoint),
        "sampling": {"max_new_tokens": 8, "temperature": 1.0, "n": samples},
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_batch": 8,
    }
    part = part_spec(optional=("token_ids", "cumulative_logprob"))
    commits = Commits()
    admit, prefixes = Engine.admit, defaultdict[Sequence[int], set[Sequence[int]]](set)

    def noted(self: Engine, requests: Sequence[Any], prefix: Sequence[int] = ()) -> list[int]:
        for request in requests:
            prefixes[tuple(request.prompt_ids)].add(tuple(prefix))
        return admit(self, requests, prefix)

    monkeypatch.setattr(Engine, "admit", noted)
    shard_generator(settings, part, commits)(given)
    assert commits.stats[3].shared_prompt_tokens > 0
    want = pq.read_table(io.BytesIO(commits.parts.pop(3)))
    deadly_ids = [prepared["__prompt_ids"][row].as_py() for row in sorted(POISON)]

    def deadly(self: Engine, requests: Sequence[Any], prefix: Sequence[int] = ()) -> list[int]:
        if any(list(request.prompt_ids) in deadly_ids for request in requests):
            raise Death
        return noted(self, requests, prefix)

    monkeypatch.setattr(Engine, "admit", deadly)
    quarantine = Quarantine(MemoryFolder(), "run", 2, "generate")
    in_processes(lambda: shard_generator(settings, part, commits, quarantine=quarantine)(given))
    got = pq.read_table(io.BytesIO(commits.parts[3]))
    names = [f"row-{row}" for row in sorted(POISON)]
    healthy = [row for row in want.to_pylist() if row["id"] not in names]
    assert [row for row in got.to_pylist() if row["id"] not in names] == healthy
    assert all(len(found) == 1 for found in prefixes.values())
    bad = [row for row in got.to_pylist() if row["id"] in names]
    assert [row["id"] for row in bad] == names
    assert {row["error"] for row in bad} == {GIVEN_UP}
    assert quarantine.folder.names("_job/quarantine") == ["000003.generate.json"]  # until the part is committed
