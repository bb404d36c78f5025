"""The snapshot of an input table that a job reads."""

from __future__ import annotations

from pipeline.config.job import JobConfig
from pipeline.input.table import TablePin, input_table
from pipeline.plan.manifest import Manifest


def newest(config: JobConfig) -> TablePin | None:
    """The newest snapshot of the job's input; None for files, and for a table that has none yet."""
    return input_table(config.input, config.storage).newest() if config.input.is_table else None


def pinned_snapshot(config: JobConfig, stored: Manifest | None) -> int | None:
    """The snapshot that the job file names, else that of the stored job, else the newest one; None as for `newest`."""
    if not config.input.is_table or config.input.snapshot is not None:
        return config.input.snapshot
    if stored is not None:
        number: int | None = stored.identity["input"].get("snapshot")
        return number
    pin = newest(config)
    return None if pin is None else pin.snapshot


def with_snapshot(config: JobConfig, snapshot: int | None) -> JobConfig:
    """The job file with `input.snapshot` set."""
    return config.model_copy(update={"input": config.input.model_copy(update={"snapshot": snapshot})})
