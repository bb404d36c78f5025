"""SIGKILL during a job: victim and moment follow from a seed; then every row is searched for in the output."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import ray
from fault_bench import SHARDS, TRIAL_SECONDS, Bench, Hung, Trial, parts, time_limit
from slow_stages import Slowness, slowed

from pipeline import job as jobs
from pipeline.commit.finalize import RowsMissing
from pipeline.commit.sink import PART
from pipeline.storage.folder import Folder

TITLES = {"actor": "ShardGenerator", "prepare": "ReadShardSource"}  # of Ray's workers
SLOWNESS = {"prepare": Slowness(prepare=0.6, answer=0.0, commit=0.0)}


@dataclass(frozen=True)
class Moment:
    """When to kill: after so many committed parts and then so many seconds. pick: chooses the victim, in [0, 1)."""

    parts: int
    seconds: float
    pick: float

    @classmethod
    def draw(cls, chance: random.Random, start: float) -> Moment:
        """A moment between the start and the end of a job. start: approximate seconds before the first part."""
        phase = chance.random()
        parts = 0 if phase < 0.25 else chance.randint(1, SHARDS - 1) if phase < 0.75 else SHARDS - chance.randint(0, 2)
        return cls(parts, chance.uniform(0, 0.4 if parts else start), chance.random())


class Killer:
    """Waits for the moment, inside `with`, kills one of the victims and completes the trial."""

    def __init__(
        self,
        trial: Trial,
        moment: Moment,
        output: Folder,
        victims: Callable[[], list[psutil.Process]],
    ) -> None:
        self.trial, self.moment, self.output, self.victims = trial, moment, output, victims
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def __enter__(self) -> Killer:
        self.began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while len(parts(self.output)) < self.moment.parts:
            if self._ended.wait(0.05):
                return
        self._ended.wait(self.moment.seconds)
        while not (self._ended.is_set() or self._killed()):
            self._ended.wait(0.03)

    def _killed(self) -> bool:
        """Kill a victim, if there is one yet; whether there is nothing more to do."""
        victims = self.victims()
        if not victims:
            return False
        victim = victims[int(self.moment.pick * len(victims))]
        names, said = self.output.names(), title(victim)
        if "_SUCCESS" in names:
            return True  # too late: the trial is a miss
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        self.trial.hit, self.trial.victim = True, said[:100]
        self.trial.at_parts = sum(bool(PART.fullmatch(name)) for name in names)
        self.trial.at_seconds = round(time.monotonic() - self.began, 2)
        return True


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def raylets() -> list[psutil.Process]:
    """Raylets that this process has started."""
    return [one for one in psutil.Process().children(recursive=True) if one.name() == "raylet"]


def workers(part_of_title: str) -> list[psutil.Process]:
    """Ray's worker processes started below this process, by title."""
    below = [worker for raylet in raylets() for worker in raylet.children()]
    return [one for one in below if (said := title(one)).startswith("ray::") and part_of_title in said]


def kill_worker(bench: Bench, fault: str, seed: int) -> Trial:
    """Kill a worker process of a stage: actor or prepare. Ray runs in this process."""
    chance = random.Random(f"{fault} {seed}")
    moment = Moment.draw(chance, bench.start_seconds)
    if fault == "prepare":  # all is prepared long before the end
        moment = Moment(0, 0.0, chance.random())
    return _disturbed(bench, Trial(fault, seed), moment, lambda: workers(TITLES[fault]))


def _disturbed(bench: Bench, trial: Trial, moment: Moment, victims: Callable[[], list[psutil.Process]]) -> Trial:
    """Run the job in this process while a victim is killed; if it fails, run it again."""
    job = bench.job()
    began = time.monotonic()
    try:
        with (
            slowed(SLOWNESS.get(trial.fault, Slowness())),
            time_limit(TRIAL_SECONDS),
            Killer(trial, moment, bench.output(job), victims),
        ):
            jobs.run(job)
    except (ray.exceptions.RayError, RowsMissing, ValueError, Hung) as error:
        trial.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        trial.recovered = "not"
        try:
            with time_limit(TRIAL_SECONDS):
                jobs.run(job)  # as its message asks the user to do
            trial.recovered = "rerun"
        except (ray.exceptions.RayError, RowsMissing, ValueError, Hung) as again:
            trial.problem += f"; again: {type(again).__name__}: {' '.join(str(again).split())[:300]}"
    trial.seconds = round(time.monotonic() - began, 2)
    return bench.look(job, trial)
