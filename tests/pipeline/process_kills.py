"""SIGKILL during a job: victim and moment follow from a seed; then every row is searched for in the output.

`kill_worker`, `TwoNodes.kill_node` and `kill_driver` each run the bench's job once, kill one of its processes, and
return a `Trial`.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from cli_command import MARK, marked
from fault_bench import SHARDS, TRIAL_SECONDS, Bench, Hung, Trial, parts, time_limit
from ray.cluster_utils import Cluster
from slow_stages import Slowness, slowed

from pipeline import job as jobs
from pipeline.commit.finalize import RowsMissing
from pipeline.commit.sink import PART
from pipeline.storage.folder import Folder

ROOT = Path(__file__).parents[2]
TITLES = {"actor": "ShardGenerator", "prepare": "ReadShardSource", "write": "ShardGenerator"}  # of Ray's workers
SLOWNESS = {"prepare": Slowness(prepare=0.6, answer=0.0, commit=0.0), "write": Slowness(commit=0.6)}
LEFT_SECONDS = 300.0  # after which no process that a killed driver had started may be alive


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
        kill: Callable[[psutil.Process], None] = psutil.Process.kill,
    ) -> None:
        self.trial, self.moment, self.output, self.victims, self.kill = trial, moment, output, victims, kill
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
            self.kill(victim)
        except (psutil.NoSuchProcess, ProcessLookupError):
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
    """Kill a worker process of a stage: actor, prepare or write. Ray runs in this process."""
    chance = random.Random(f"{fault} {seed}")
    moment = Moment.draw(chance, bench.start_seconds)
    if fault == "prepare":  # all is prepared long before the end
        moment = Moment(0, chance.uniform(0, 2 * bench.start_seconds), chance.random())
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


class TwoNodes:
    """A cluster of the driver's node and one more, which is replaced after it has been killed."""

    def __init__(self) -> None:
        node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
        self.node = node
        found_dead = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}  # else it takes 20 s
        head = {**node, "include_dashboard": False, "_system_config": found_dead}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        self.driver = {one.pid for one in raylets()}

    def second(self) -> list[psutil.Process]:
        """The second node's raylet, if it lives."""
        return [one for one in raylets() if one.pid not in self.driver and one.status() != psutil.STATUS_ZOMBIE]

    def kill_node(self, bench: Bench, seed: int) -> Trial:
        """The second node's raylet; its workers die with it."""
        for dead in list(self.cluster.worker_nodes):
            self.cluster.remove_node(dead, allow_graceful=False)
        self.cluster.add_node(**self.node)
        moment = Moment.draw(random.Random(f"raylet {seed}"), bench.start_seconds)
        return _disturbed(bench, Trial("raylet", seed), moment, self.second)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def kill_driver(bench: Bench, seed: int) -> Trial:
    """The command: its whole process group if the seed is even, else the driver alone; then the same again."""
    chance = random.Random(f"driver {seed}")
    moment = Moment.draw(chance, 1.5 * bench.start_seconds)
    trial, job = Trial("driver", seed, recovered="rerun"), bench.job()
    file = bench.folder / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
    began, mark = time.monotonic(), uuid.uuid4().hex
    said = bench.folder / f"driver-{seed}.log"
    first = _start([str(ROOT / "tests" / "pipeline" / "slow_stages.py"), "run", str(file)], mark, said)

    def kill(process: psutil.Process) -> None:
        if seed % 2:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)

    def alive() -> list[psutil.Process]:
        return [psutil.Process(first.pid)] if first.poll() is None else []

    try:
        with Killer(trial, moment, bench.output(job), alive, kill):
            first.wait(TRIAL_SECONDS)
        trial.victim = "driver alone" if seed % 2 else "process group"
        again = _start(["-m", "pipeline", "run", str(file)], mark, said)
        if again.wait(TRIAL_SECONDS) != 0:
            trial.problem = f"the rerun's exit is {again.returncode}: {' '.join(said.read_text().split())[-300:]}"
    except subprocess.TimeoutExpired:
        trial.problem = f"hung: not done after {TRIAL_SECONDS:.0f} s"
    trial.seconds = round(time.monotonic() - began, 2)
    left = _end(mark, 0 if trial.problem else LEFT_SECONDS)
    if left and not trial.problem:
        trial.problem = f"alive {LEFT_SECONDS:.0f} s after the rerun: {', '.join(left)[:200]}"
    return bench.look(job, trial)


def _start(command: list[str], mark: str, said: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, whose members, and all below them, carry the mark in their environment."""
    with said.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark},
        )


def _end(mark: str, patience: float) -> list[str]:
    """Waits for all processes that carry the mark to end, then kills the rest: their titles."""
    deadline = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    titles = [title(one) for one in left]
    for one in left:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    return titles
