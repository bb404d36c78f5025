"""Whether a place has the processors that the workers of a training ask for. Imports no model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from pipeline.config.tune import WorkersConfig


def check_machine(workers: WorkersConfig | None) -> None:
    """Raise UserError if this machine is too small for workers that are its processes."""
    if workers is not None and workers.address is None:
        check_fits(workers, {"CPU": process_cpus(), "GPU": torch.cuda.device_count()}, "this machine")


def check_fits(workers: WorkersConfig, resources: Mapping[str, float], place: str) -> None:
    """Raise UserError if a place has too few CPUs or GPUs for the workers."""
    for name, each in (("CPU", workers.cpus), ("GPU", workers.gpus)):
        has = resources.get(name, 0)
        if workers.count * each > has:
            raise UserError(f"workers: {workers.count} × {each:g} {name} asked for, and {place} has {has:g}")


def threads(workers: WorkersConfig) -> int:
    """Of a worker, where `training.threads` says nothing."""
    return max(1, int(workers.cpus))
