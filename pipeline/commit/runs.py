"""Records the runs that answer shards, in `_job/runs.json`: start, end, devices, and versions.

Only reports read the file, and only the run that holds the lease writes it. A job is complete without the file.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

from pipeline.runtime.signals import shielded
from pipeline.storage.folder import STORE_ERRORS, Folder, read_json, write_json

log = logging.getLogger(__name__)
RUNS = "_job/runs.json"
KEPT = 50  # maximum number of runs in the file; older runs are dropped
PACKAGES = ("skipdecode", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy", "s3fs")


@dataclass(frozen=True)
class JobRun:
    """A run of a job, as recorded in `_job/runs.json`."""

    began: float  # start of the run, in s since 1970
    devices: float  # maximum number of GPUs in use; on CPUs, maximum number of actors
    ended: float | None = None  # end of the run, in s since 1970; None if the run has not ended, or was killed
    versions: dict[str, str] = field(default_factory=dict)  # versions of Python and of packages on the driver


@contextmanager
def recorded_run(folder: Folder, devices: float, began: float) -> Iterator[None]:
    """Record the `with` block as a run, at its start and at its end. devices, began: see `JobRun`."""
    run = JobRun(began, devices, None, _versions())
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


def _versions() -> dict[str, str]:
    """Return name -> version of Python and of the packages that affect answers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # skip a missing package, e.g. skipdecode if `ray job submit` uploaded it
            found[name] = version(name)
    return found


def _warn_of_other_versions(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log a warning if the job's last run had other versions, because answers may differ slightly."""
    names = [name for name in (*PACKAGES, "python") if before.get(name) != now.get(name)]
    changed = [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]
    if before and changed:
        log.warning("this run has other versions than the job's last run: %s", ", ".join(changed))


def _write(folder: Folder, runs: Sequence[JobRun]) -> None:
    with suppress(*STORE_ERRORS):  # ignore errors, because only reports need the record
        write_json(folder, RUNS, [asdict(run) for run in runs])
