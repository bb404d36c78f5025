"""`skipdecode run` as a process of its own, and checks of what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from pipeline.config.job import JobConfig


def parts(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("*.parquet"))}


class Command:
    """`skipdecode run` of a job, in a process group of its own."""

    arguments: tuple[str, ...] = ("-m", "pipeline", "run")

    def __init__(self, folder: Path, job: JobConfig, *options: str) -> None:
        self.file = folder / "job.yaml"
        self.file.write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments, str(self.file), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=200)
        return self.process.returncode, out, err

    def wait_for_parts(self, output: Path, count: int) -> None:
        self.wait_until(lambda: len(list(output.glob("part-*.parquet"))) >= count)

    def wait_until(self, reached: Callable[[], bool], every: float = 0.01) -> None:
        """Wait for a condition, asked every so many seconds. AssertionError if the command ends first or 150 s pass."""
        deadline = time.monotonic() + 150
        while not reached():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(every)


class SlowCommand(Command):
    """The same with slow stages, so that a signal comes before its end."""

    arguments = (str(Path(__file__).with_name("slow_stages.py")), "run")


def assert_released(output: Path) -> None:
    """The last run has released its lease."""
    (term,) = (output / "_job" / "lease").iterdir()
    assert json.loads(term.read_text())["released"]


def rays() -> set[int]:
    """Process ids of all Ray servers and workers on this machine."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "raylet" in line or "gcs_server" in line or line.startswith("ray::"):
            found.add(process.info["pid"])
    return found


def assert_no_new_rays(before: set[int]) -> None:
    """All Ray processes that are not in `before` end within two minutes; on a quiet machine in seconds."""
    deadline = time.monotonic() + 120
    while new := rays() - before:
        assert time.monotonic() < deadline, new
        time.sleep(0.2)
