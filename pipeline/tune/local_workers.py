"""A training in several processes of this machine: data parallel, gradients averaged.

The processes meet in a file and talk over the loopback interface, so nothing listens to other machines.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from pipeline.config.tune import TuneConfig
from pipeline.tune.fit import threads
from pipeline.tune.plan import plan_training
from pipeline.tune.processes import run_processes
from pipeline.tune.train import train

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def train_in_processes(config: TuneConfig, recorded: TuneConfig) -> None:
    """Run `train` in `workers.count` processes, each of which loads the model. recorded: as in `train`.

    Raises as `run_processes`.
    """
    workers = config.workers
    assert workers is not None and workers.address is None
    values = [one.model_dump(exclude_unset=True) for one in (config, recorded)]
    run_processes(workers.count, work, *values)


def work(rank: int, folder: Path, config: dict[str, Any], recorded: dict[str, Any]) -> None:
    """One process's part. folder: that all processes share; the configs as values."""
    given = TuneConfig.model_validate(config)
    workers = given.workers
    assert workers is not None
    # accelerate reads these
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(workers.count), "LOCAL_WORLD_SIZE": str(workers.count)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, LOOPBACK)
    torch.set_num_threads(threads(workers))
    if workers.gpus:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if workers.gpus else "gloo",
        store=torch.distributed.FileStore(str(folder / "store"), workers.count),  # type: ignore[attr-defined]
        rank=rank,
        world_size=workers.count,
    )
    with redirect_stdout(sys.stderr):  # losses are progress; a command may print its result alone
        train(given, plan_training(given), recorded=TuneConfig.model_validate(recorded))
    # not after an error: others would fail before this process has left its traceback
    torch.distributed.destroy_process_group()
