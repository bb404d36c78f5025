"""`skipdecode run` as a process of its own, and checks of what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from pipeline.config.job import JobConfig

HANGING_SECONDS = 600.0  # of what hangs: nothing else takes as long on a slow machine
MARK = "SKIPDECODE_TEST_MARK"  # a variable in the environment of a command and of all processes below it


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry a mark."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == mark:
                found.append(one)
    return found


def wait_until(reached: Callable[[], object], every: float = 0.05) -> None:
    """Wait for a condition, asked every so many seconds. AssertionError once it will hardly be met any more."""
    deadline = time.monotonic() + HANGING_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)


class Command:
    """`skipdecode run` of a job, in a process group of its own. env: added to this process's."""

    arguments: tuple[str, ...] = ("-m", "pipeline", "run")

    def __init__(self, folder: Path, job: JobConfig, *options: str, **env: str) -> None:
        self.file = folder / "job.yaml"
        self.file.write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments, str(self.file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **env},
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=HANGING_SECONDS)
        return self.process.returncode, out, err

    def wait_for_parts(self, output: Path, count: int) -> None:
        self.wait_until(lambda: len(list(output.glob("part-*.parquet"))) >= count)

    def wait_until(self, reached: Callable[[], bool], every: float = 0.01) -> None:
        """Wait for a condition, asked every so many seconds. AssertionError if the command ends first."""

        def reached_or_ended() -> bool:
            return self.process.poll() is not None or reached()

        wait_until(reached_or_ended, every)
        assert reached(), self.process.communicate()[1]

    def assert_nothing_left(self) -> None:
        """All processes that the command started end, on a quiet machine in seconds."""
        wait_until(lambda: not marked(self.mark), every=0.2)


class SlowCommand(Command):
    """The same with slow stages, of which two parts come while the file `held` exists: a signal precedes their end."""

    arguments = (str(Path(__file__).with_name("slow_stages.py")), "run")

    def __init__(self, folder: Path, job: JobConfig) -> None:
        self.held = folder / "held"
        self.held.touch()
        super().__init__(folder, job, SKIPDECODE_TEST_HOLD=str(self.held))


def assert_released(output: Path) -> None:
    """The last run has released its lease."""
    (term,) = (output / "_job" / "lease").iterdir()
    assert json.loads(term.read_text())["released"]
