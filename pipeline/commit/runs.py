"""Records the runs that answer shards, in `_job/runs.json`: start, end, settings, and versions.

Only reports read the file, and only the run that holds the lease writes it. A job is complete without the file.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline.config.job import JobConfig
from pipeline.messages import in_texts, without_secrets
from pipeline.runtime.signals import shielded
from pipeline.storage.folder import STORE_ERRORS, Folder, read_json, write_json

log = logging.getLogger(__name__)
RUNS = "_job/runs.json"
KEPT = 50  # maximum number of runs in the file; older runs are dropped
COMPILER = "C++ compiler"
PACKAGES = ("skipdecode", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy", "s3fs")


@dataclass(frozen=True)
class JobRun:
    """A run of a job, as recorded in `_job/runs.json`."""

    began: float  # start of the run, in s since 1970
    answering: float  # end of planning and start of answering, in s since 1970
    rows: int  # number of unanswered rows at the start of the run
    devices: float  # maximum number of GPUs in use; on CPUs, maximum number of actors
    ended: float | None = None  # end of the run, in s since 1970; None if the run has not ended, or was killed
    price_per_hour: float | None = None
    config: dict[str, Any] = field(default_factory=dict)  # settings of the job file that differ from the defaults
    versions: dict[str, str] = field(default_factory=dict)  # versions of Python and of packages on the driver


@contextmanager
def recorded_run(folder: Folder, config: JobConfig, began: float, rows: int) -> Iterator[None]:
    """Record the `with` block as a run, at its start and at its end. rows: number of unanswered rows at the start."""
    values = in_texts(config.model_dump(mode="json", exclude_defaults=True), without_secrets)
    run = JobRun(began, time.time(), rows, config.devices, None, config.price_per_hour, values, versions())
    earlier = read_runs(folder)[1 - KEPT :]
    if earlier:
        _warn_of_other_versions(earlier[-1].versions, run.versions)
    _write(folder, [*earlier, run])
    try:
        yield
    finally:
        with shielded(), suppress(*STORE_ERRORS):  # ignore errors, because only reports need the record
            runs = read_runs(folder)
            if runs[-1:] == [run]:  # else another run has taken over
                _write(folder, [*runs[:-1], replace(run, ended=time.time())])


def read_runs(folder: Folder) -> list[JobRun]:
    """Return the recorded runs, oldest first; an empty list if the record is missing or damaged."""
    return read_json(folder, RUNS, list[JobRun]) or []


def versions() -> dict[str, str]:
    """Return name -> version of Python, the C++ compiler, the system, and the packages that affect answers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # skip a missing package, e.g. skipdecode if `ray job submit` uploaded it
            found[name] = version(name)
    return {**found, COMPILER: _compiler(), "system": platform.platform()}


def _compiler() -> str:
    """Return the version of the C++ compiler that builds the CPU kernels; "none" if there is no compiler."""
    command = [*(shlex.split(os.environ.get("CXX", "")) or ["g++"]), "--version"]
    lines = list[str]()
    with suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    return lines[0] if lines else "none"


def _warn_of_other_versions(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log a warning if the job's last run had other versions, because answers may differ slightly."""
    names = [name for name in (*PACKAGES, "python", COMPILER) if before.get(name) != now.get(name)]
    changed = [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]
    if before and changed:
        log.warning("this run has other versions than the job's last run: %s", ", ".join(changed))


def _write(folder: Folder, runs: Sequence[JobRun]) -> None:
    with suppress(*STORE_ERRORS):  # ignore errors, because only reports need the record
        write_json(folder, RUNS, [asdict(run) for run in runs])
