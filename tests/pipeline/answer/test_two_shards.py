"""Several shards in one actor, one a thread: the next one begins while the last one is committed, or, if an engine's
calls share steps, as those of vLLM do, while rows of the last one run."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cli_command import HANGING_SECONDS, wait_until
from in_process import job_values
from memory_folder import MemoryFolder
from moved_clock import Clock
from part_builders import Commits, part_spec, shard_batch, shard_generator
from prompt_specs import spec_of

from actors.engine.engine import Engine
from actors.engine.loop import Call, Loop
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.stage import ShardGenerator
from pipeline.answer.stats import ShardStats
from pipeline.config.job import JobConfig
from pipeline.input.shards import Shard
from pipeline.plan.batching import Batching
from pipeline.prepare.prompts import prepare_table
from pipeline.run.stages import _calls
from pipeline.runtime.quarantine import Quarantine, marker_name, release_shard

ROWS = 24


@pytest.fixture
def shards(checkpoint: Path) -> list[dict[str, Any]]:
    spec = spec_of(checkpoint)
    batches = []
    for shard in range(3):
        words = [" ".join(["cheap"] * (1 + (row + shard) % 4)) for row in range(ROWS)]
        rows = pa.table({"id": [f"{shard}-{row}" for row in range(ROWS)], "prompt": words})
        batches.append(shard_batch(shard, prepare_table(rows, spec), first_row=100 * shard))
    return batches


def actor(checkpoint: Path, commits: Commits | None = None, **more: Any) -> ShardGenerator:
    settings = {
        "checkpoint": str(checkpoint),
        "sampling": {"max_new_tokens": 24, "temperature": 1.0},
        "dtype": "float32",
        "device": "cpu",
        "scheduler": "refill",
        "max_batch": 8,
    }
    return shard_generator(settings, part_spec(optional=("token_ids",)), commits or Commits(), **more)


def at_once(one: ShardGenerator, shards: list[dict[str, Any]]) -> list[list[int]]:
    """Shards that are committed in each of the calls, two of which are in the actor, as Ray makes them."""
    with ThreadPoolExecutor(2) as calls:
        futures: list[Future[dict[str, Any]]] = []
        for batch in shards:
            before = one._last_turn
            futures.append(calls.submit(one, batch))
            while one._last_turn is before and not futures[0].done():
                threading.Event().wait(0.001)  # they begin in their order
            if len(futures) > 1:
                futures[-2].result()
        return [future.result()["shard"].tolist() for future in futures]


def drain_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine call `on_drain` as soon as a call is added."""
    plain = Loop.add

    def add(self: Loop, requests: Any, on_batch: Any, on_drain: Any, among: Any) -> Call:
        call = plain(self, requests, on_batch, among=among)
        if on_drain is not None:
            on_drain()
        return call

    monkeypatch.setattr(Loop, "add", add)


@pytest.mark.parametrize("drains", [False, True])
def test_a_part_does_not_depend_on_the_shard_before(
    checkpoint: Path, shards: list[dict[str, Any]], drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, step = Clock(), Engine.step
    monkeypatch.setattr("pipeline.answer.stage.time", clock)

    def stepped(self: Engine) -> Any:
        clock.now += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", stepped)
    alone, together = Commits(), Commits()
    for batch in shards:
        actor(checkpoint, alone)(batch)
    if drains:
        drain_at_once(monkeypatch)
    coordinator = Coordinator()
    quarantine = Quarantine(MemoryFolder(), "run", 2, "generate")
    one = actor(checkpoint, together, coordinator=coordinator, quarantine=quarantine)
    assert at_once(one, shards) == [[0], [1], [2]]
    assert coordinator.working() == {0, 1, 2}
    assert together.parts == alone.parts
    for shard in range(3):
        for name in ("rows", "answers", "prompt_tokens", "generated_tokens", "decode_steps", "layer_steps"):
            assert getattr(together.stats[shard], name) == getattr(alone.stats[shard], name)
    times = [(stats.started, stats.finished) for _, stats in sorted(together.stats.items())]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_the_second_shard_begins_while_the_first_one_ends(
    checkpoint: Path, shards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drain_at_once(monkeypatch)
    commits = Commits()
    one, step = actor(checkpoint, commits), Engine.step
    queued: list[int] = []

    def watched(self: Engine) -> Any:
        if not queued:
            wait_until(lambda: len(one.generator.calls._queue) > 1, every=0.001)  # the second thread prepares its rows
        queued.append(len(one.generator.calls._queue))
        return step(self)

    monkeypatch.setattr(Engine, "step", watched)
    at_once(one, shards)
    assert max(queued) == 2  # the call that runs, and the next one
    # of shards that share steps the seconds of each are not known, nor its rates
    assert commits.stats[0].overlaps and commits.stats[1].overlaps
    release_shard(one.quarantine.folder, 0)
    one(shards[0])
    assert not commits.stats[0].overlaps


def test_a_third_shard_begins_while_a_row_of_the_first_one_runs(
    checkpoint: Path, shards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard ends only when rows of the third one have come. Parts are those of shards that run alone."""
    drain_at_once(monkeypatch)
    alone, together, coordinator = Commits(), Commits(), Coordinator()
    for batch in shards:
        actor(checkpoint, alone)(batch)
    one, finish, came = actor(checkpoint, together, coordinator=coordinator), Loop.finish, threading.Event()

    def finishing(self: Loop, call: Call) -> Any:
        while not came.is_set() and len(self._queue) < 3:
            assert not coordinator.done
            came.wait(0.001)
        came.set()
        return finish(self, call)

    monkeypatch.setattr(Loop, "finish", finishing)
    with ThreadPoolExecutor(3) as calls:
        committed = list(calls.map(one, shards))
    assert came.is_set()
    assert [batch["shard"].tolist() for batch in committed] == [[0], [1], [2]]
    assert together.parts == alone.parts


def test_a_shard_that_may_have_killed_its_process_shares_the_engine_with_no_other(
    checkpoint: Path, shards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its next death is not counted against the shard beside it, nor that one's against it."""
    drain_at_once(monkeypatch)
    folder = MemoryFolder()
    quarantine = Quarantine(folder, "run", 3, "generate")
    quarantine.begin(1, ROWS)  # an attempt at the second shard has died
    one, step, began = actor(checkpoint, quarantine=quarantine), Engine.step, Quarantine.begin
    in_flight: list[int] = []

    def watched(self: Engine) -> Any:
        threading.Event().wait(0.02)  # another thread might begin its shard
        return step(self)

    def beginning(self: Quarantine, shard: int, rows: int) -> Any:
        if shard in (1, 2):
            in_flight.append(len(one.generator.engine.rows))
        return began(self, shard, rows)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(Quarantine, "begin", beginning)
    at_once(one, shards)
    assert in_flight == [0, 0]
    assert json.loads(folder.read(marker_name(1, "generate")))["outside"] == 0


def test_a_shard_that_must_not_begin_any_more_holds_up_no_other(checkpoint: Path, shards: list[dict[str, Any]]) -> None:
    coordinator = Coordinator()
    one = actor(checkpoint, coordinator=coordinator)
    one(shards[0])
    coordinator.stop()
    assert at_once(one, shards[1:]) == [[], []]


def test_an_error_in_a_shard_lets_the_next_one_run(
    checkpoint: Path, shards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = actor(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "admit", lambda *given: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            one(shards[0])
    assert one(shards[1])["shard"].tolist() == [1]


def test_the_engine_answers_the_second_shard_while_the_first_one_is_committed(
    checkpoint: Path, shards: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to an object store may take seconds."""
    answered = threading.Event()

    class Slow(Commits):
        def __call__(self, shard: Shard, data: bytes, stats: ShardStats) -> None:
            if shard.index == 0:
                assert answered.wait(HANGING_SECONDS)
            else:
                answered.set()
            super().__call__(shard, data, stats)

    commits = Slow()
    at_once(actor(checkpoint, commits), shards[:2])
    assert list(commits.parts) == [1, 0]


@pytest.mark.parametrize(
    ("model", "shard_rows", "shards", "calls"),
    [
        ({"engine": "vllm"}, 64, 100, 5),
        ({"engine": "vllm"}, 4096, 100, 2),
        ({"engine": "vllm"}, 64, 6, 3),  # half of the shards: two actors share them
        ({"dtype": "bfloat16"}, 64, 100, 2),
        ({"dtype": "float32"}, 64, 100, 1),
    ],
)
def test_an_actor_gets_enough_shards_to_fill_its_slots(
    model: dict[str, Any], shard_rows: int, shards: int, calls: int
) -> None:
    values = job_values("in", "out", "model", model=model, actors={"count": 2})
    batching = Batching(
        shard_rows=shard_rows, shard_bytes=1, cache_bytes=1, max_batch=64, threads=1, scheduler="refill"
    )
    assert _calls(JobConfig.model_validate(values), batching, shards) == calls
