"""A training in several processes of this machine, by torch's launcher: data parallel, gradients averaged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from actors.engine.errors import UserError
from pipeline.config.tune import TuneConfig, WorkersConfig
from pipeline.tune.plan import plan_training
from pipeline.tune.train import train

SECONDS = 1.0  # between looks at whether the parent lives


def train_in_processes(config: TuneConfig, recorded: TuneConfig) -> None:
    """Run `train` in `workers.count` processes, each of which loads the model.

    recorded: as in `train`.

    Raises:
        UserError: the machine is too small for the workers.
        RuntimeError: training failed, or a process died.
        KeyboardInterrupt: it was interrupted.
    """
    workers = config.workers
    assert workers is not None and workers.address is None
    check_fits(workers, {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, "this machine")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers.count,
        run_id="training",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # the same command goes on from the last saved step
    )
    values = [one.model_dump(exclude_unset=True) for one in (config, recorded)]
    try:
        elastic_launch(settings, work)(*values, os.getpid())
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        lines = [line.strip() for line in str(first.message).splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"a worker ended with {first.exitcode}") from failed


@record
def work(config: dict[str, Any], recorded: dict[str, Any], parent: int) -> None:
    """One process's part, with the environment that the launcher gives it; the configs as values."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    given = TuneConfig.model_validate(config)
    workers = given.workers
    assert workers is not None
    torch.set_num_threads(threads(workers))
    if workers.gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if workers.gpus else "gloo")
    try:
        train(given, plan_training(given), recorded=TuneConfig.model_validate(recorded))
    finally:
        torch.distributed.destroy_process_group()


def check_fits(workers: WorkersConfig, resources: Mapping[str, float], place: str) -> None:
    """Raise UserError if a place has too few CPUs or GPUs for the workers."""
    for name, each in (("CPU", workers.cpus), ("GPU", workers.gpus)):
        has = resources.get(name, 0)
        if workers.count * each > has:
            raise UserError(f"workers: {workers.count} × {each:g} {name} asked for, and {place} has {has:g}")


def threads(workers: WorkersConfig) -> int:
    """Of a worker, where `training.threads` says nothing."""
    return max(1, int(workers.cpus))


def _end_with(parent: int) -> None:
    """A worker whose launcher was killed would go on, and write where the next run of the same command does."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)
