"""Nothing twice, nothing skipped: runs that overlap, die between any two operations, or find another job."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from memory_folder import Killed, MemoryFolder, Stepped
from part_builders import to_table

from pipeline import nightly
from pipeline.answer.stats import add_up
from pipeline.commit.claim import LEDGER, check_same_job
from pipeline.commit.finalize import write_success
from pipeline.commit.lease import LeaseLost
from pipeline.commit.sink import SUCCESS
from pipeline.config.job import JobConfig
from pipeline.input.files import InputFile
from pipeline.job import Night
from pipeline.nightly import NightlyResult
from pipeline.plan import plan_files
from pipeline.plan.batching import Batching
from pipeline.plan.inputs import unchanged_files
from pipeline.plan.manifest import ANSWERS_VERSION, Manifest, NoRows
from pipeline.report.summary import JobResult
from pipeline.run.stages import Backend

BATCHING = Batching(10, 10, 10, 10, 1)
_here = threading.local()  # world and root folder of the command that runs in this thread


@dataclass
class World:
    """A store, and the input files that lie there: URL -> (bytes, version); a file of 0 bytes has no rows."""

    store: dict[str, bytes] = field(default_factory=dict)
    inputs: dict[str, tuple[int, str]] = field(default_factory=dict)

    def root(self, gate: Callable[[], None] = lambda: None) -> MemoryFolder:
        return MemoryFolder(self.store, gate=gate)

    def run(self, gate: Callable[[], None] = lambda: None, version: int = 0, overwrite: bool = False) -> NightlyResult:
        """A command with version `version` of the job, whose answers are one file for each input file."""
        _here.world, _here.root = self, self.root(gate)
        values = {"input": {"path": "in"}, "output": {"path": "root"}, "model": {"path": "m"}, "max_error_rate": 1}
        config = JobConfig.model_validate({**values, "sampling": {"seed": version}})
        return nightly.run_in(_here.root, config, Backend(), overwrite)

    def folder(self, name: str) -> set[str]:
        return set(self.root().sub(name).names())

    def good(self) -> list[str]:
        """The files of all runs whose folder has `_SUCCESS`."""
        runs = {run.folder: run for run in nightly.read(self.root()).runs}
        names = [name for name in self.root().folders() if SUCCESS in self.folder(name)]
        assert all(runs[name].state == "success" for name in names)
        return sorted(file.url for name in names for file in runs[name].files)


def _run(config: JobConfig, *, check: str, backend: Backend, night: Night) -> JobResult:
    """Stands for `job.run`."""
    folder: Any = _here.root.sub(config.output.path.rpartition("/")[2])
    stored = plan_files.load(folder)
    new = [InputFile(url, *at, (at[0],), (at[0],)) for url, at in night.files.items()]
    pinned = unchanged_files(stored.files, night.files) if stored else new
    if not any(file.rows for file in pinned):
        raise NoRows("no rows")
    identity: dict[str, Any] = {"seed": config.sampling.seed, "files": [[file.url, file.version] for file in pinned]}
    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()
    identity |= {"schedule": {"speedup": 1.0, "num_layers": 4}, "answers_version": ANSWERS_VERSION}
    manifest = Manifest(fingerprint, identity, BATCHING, pinned, [], pa.schema([]))
    check_same_job(folder, stored, manifest)
    totals, fresh = add_up(to_table([])), 0
    if not folder.exists(SUCCESS):
        night.begin()
        if stored is None:
            plan_files.save(folder, manifest)
        fresh = sum([folder.create(_answer_name(file.url), fingerprint.encode()) for file in pinned])
        if night.accept(manifest, totals):
            write_success(folder, manifest, totals)
    return JobResult(manifest, totals, fresh, 0.0)


@pytest.fixture(autouse=True)
def _one_file_is_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(nightly.jobs, "run", _run)
    monkeypatch.setattr(nightly, "list_files", lambda *_, **__: dict(_here.world.inputs))
    monkeypatch.setattr(nightly, "input_root", lambda *_: "in")
    monkeypatch.setattr(nightly, "_folder", lambda root, name, storage: root.sub(name))
    monkeypatch.setattr(
        nightly, "_now", lambda: datetime.fromtimestamp(next(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )


def _answer_name(url: str) -> str:
    return f"answer-{url}"


@settings(max_examples=45, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class OverlappingRuns(RuleBasedStateMachine):
    """Any number of runs at once, without a lease, each stopped before every operation on the store."""

    processes = Bundle("processes")

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.version = 0
        self.all: list[Stepped] = []
        self.compact_every, nightly.COMPACT_EVERY = nightly.COMPACT_EVERY, 2

    @initialize(count=st.integers(1, 3))
    def first_files(self, count: int) -> None:
        for _ in range(count):
            self.a_file_arrives()

    @rule()
    def a_file_arrives(self) -> None:
        self.world.inputs[f"file-{len(self.world.inputs)}"] = (7, "1")

    @rule()
    def the_job_changes(self) -> None:
        self.version += 1

    @rule(target=processes, overwrite=st.sampled_from([False, False, False, True]), count=st.integers(1, 2))
    def runs_begin(self, overwrite: bool, count: int) -> Any:
        version = self.version
        new = [Stepped(lambda gate: self.world.run(gate, version, overwrite)) for _ in range(count)]
        self.all += new
        return multiple(*new)

    @rule(process=processes, times=st.integers(1, 12) | st.just(100))
    def one_goes_on(self, process: Stepped, times: int) -> None:
        process.step(times)

    @rule(process=consumes(processes))
    def one_dies(self, process: Stepped) -> None:
        if not process.ended:
            process.kill()

    @invariant()
    def nothing_twice(self) -> None:
        answered: list[str] = []
        listed = nightly.read(self.world.root()).runs
        assert len({run.folder for run in listed}) == len(listed)
        for run in listed:
            files, found = {file.url for file in run.files}, self.world.folder(run.folder)
            assert {name for name in found if name.startswith("answer-")} <= {_answer_name(url) for url in files}
            if run.state == "success":
                answered += files
                assert {_answer_name(url) for url in files} <= found
            else:
                assert "_SUCCESS" not in found
        assert len(answered) == len(set(answered))
        assert set(self.world.good()) <= set(answered)

    @invariant()
    def nobody_fails_but_by_being_overtaken(self) -> None:
        for process in self.all:
            assert process.error is None or isinstance(process.error, LeaseLost | Killed), repr(process.error)

    def teardown(self) -> None:
        """Whatever has happened, one undisturbed run makes everything good; and the sleepers do no harm after it."""
        try:
            self.world.run(version=self.version)
            self._all_answered_once()
            self.a_file_arrives()
            for process in self.all:
                process.step(1000)
                assert process.ended
            self.nothing_twice()
            self.nobody_fails_but_by_being_overtaken()
            self.world.run(version=self.version)
            self._all_answered_once()
            before = set(self.world.store)
            assert self.world.run(version=self.version).finished == []
            assert all("/through-" in name for name in before ^ set(self.world.store))
        finally:
            nightly.COMPACT_EVERY = self.compact_every
            for process in self.all:
                if not process.ended:
                    process.kill()

    def _all_answered_once(self) -> None:
        assert self.world.good() == sorted(self.world.inputs)


test_overlapping_runs = OverlappingRuns.TestCase


def test_a_run_may_die_before_any_operation_and_sleepers_wake_up_at_any_later_one() -> None:
    """Every crash point of a run, followed by a run of the same job or another, and by the first one's awakening."""
    points = 0
    for version in (0, 1):
        for overwrite in (False, True):
            point = 0
            while True:
                world = World(inputs={"a": (7, "1"), "b": (7, "1")})
                sleeper = Stepped(world.run)
                sleeper.step(point)
                if sleeper.ended:
                    break
                world.inputs["c"] = (7, "1")
                world.run(version=version, overwrite=overwrite)
                sleeper.step(1000)
                assert sleeper.error is None or isinstance(sleeper.error, LeaseLost)
                assert world.good() == ["a", "b", "c"]
                point += 1
            points += point
    assert points > 50


@pytest.mark.parametrize(("change", "says"), [("gone", "b: gone since"), ("other", "b: changed since")])
def test_a_pinned_file_that_went_stops_the_run_until_it_is_given_up(change: str, says: str) -> None:
    world = World(inputs={"a": (7, "1"), "b": (7, "1")})
    _stop_after(world, "answer-a")
    if change == "gone":
        del world.inputs["b"]
    else:
        world.inputs["b"] = (9, "2")
    before = dict(world.store)
    with pytest.raises(ValueError, match=rf"^the run in root/\S+ has not finished: {says} .* --overwrite$"):
        world.run()
    assert world.store == before
    (only,) = world.run(overwrite=True).finished
    assert only.run.number == 2 and [file.url for file in only.run.files] == sorted(world.inputs)
    assert nightly.read(world.root()).runs[0].why == "--overwrite"


def test_a_pin_that_cannot_be_read_names_the_way_out() -> None:
    world = World(inputs={"a": (7, "1")})
    _stop_after(world, "answer-a")
    (name,) = nightly.unfinished(world.root(), nightly.read(world.root()))  # type: ignore[arg-type]
    world.store[f"root/{name}/_job/job.json"] = b"{"
    with pytest.raises(ValueError, match=r"job.json: damaged .*; --overwrite abandons this run"):
        world.run()
    assert len(world.run(overwrite=True).finished) == 1


def test_the_folder_of_a_run_may_be_removed_and_its_files_stay_answered() -> None:
    world = World(inputs={"a": (7, "1")})
    world.run()
    for name in [name for name in world.store if LEDGER not in name]:
        del world.store[name]
    before = dict(world.store)
    assert world.run().finished == [] and world.store == before


def _stop_after(world: World, name: str) -> None:
    """A run that dies as soon as a file of that name is there."""
    process = Stepped(world.run)
    while not any(path.endswith(name) for path in world.store):
        process.step(1)
        assert not process.ended
    process.kill()
