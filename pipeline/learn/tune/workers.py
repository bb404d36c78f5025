"""Trains data-parallel in several processes of this machine: each step adds up the gradients of all processes.

The processes find each other through a file and use the loopback interface, so no other machine can connect.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from pipeline.config.tune import TuneConfig, WorkersConfig
from pipeline.learn.tune.plan import TrainingPlan
from pipeline.learn.tune.train import train

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
SECONDS = 1.0  # time between two checks of the other processes; an interrupt is raised within this time
OUT_OF_MEMORY = f"{torch.OutOfMemoryError.__module__}.{torch.OutOfMemoryError.__qualname__}: "


def check_machine(workers: WorkersConfig | None) -> None:
    """Raise UserError if this machine has too few CPUs or GPUs for the workers."""
    if workers is None:
        return
    for name, each, has in (("CPU", workers.cpus, process_cpus()), ("GPU", workers.gpus, torch.cuda.device_count())):
        if workers.count * each > has:
            raise UserError(
                f"workers: {workers.count} × {each:g} {name} needed, but this machine has {has:g}; use fewer"
            )


def run_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `count` new processes. End all of them when one fails.

    Raises:
        torch.OutOfMemoryError: A process ran out of memory.
        RuntimeError: A process failed or died. If it failed, the message is the last line of its traceback. This line
            names the exception type, by which commands recognize a UserError. `__cause__` holds the whole traceback.
    """
    context = start_processes(function, args=arguments, nprocs=count, join=False, daemon=True)
    try:
        while not context.join(SECONDS, grace_period=SECONDS):
            pass
    except ProcessRaisedException as error:
        line = str(error).strip().splitlines()[-1]
        if line.startswith(OUT_OF_MEMORY):
            raise torch.OutOfMemoryError(line.removeprefix(OUT_OF_MEMORY)) from error
        raise RuntimeError(line) from error
    except ProcessExitedException as error:
        ended = f"was ended by {error.signal_name}" if error.signal_name else f"ended with status {error.exit_code}"
        raise RuntimeError(f"worker {error.error_index} {ended}") from error
    finally:
        for process in context.processes:
            process.kill()  # safe: tune.json is written last, and a training without it is unfinished
            process.join()


def train_in_processes(config: TuneConfig, plan: TrainingPlan) -> None:
    """Run `train` in `workers.count` processes, each of which loads the model. Raises what `run_processes` raises."""
    assert config.workers is not None
    with tempfile.TemporaryDirectory(prefix="skipdecode-workers-") as folder:
        run_processes(config.workers.count, _work, f"{folder}/store", config, plan)


def _work(rank: int, store: str, config: TuneConfig, plan: TrainingPlan) -> None:
    """Train as worker number `rank`. store: path of the file through which the processes find each other."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    workers = config.workers
    assert workers is not None
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, LOOPBACK)
    torch.set_num_threads(max(1, int(workers.cpus)))
    if workers.gpus:
        torch.cuda.set_device(rank)
    meeting = torch.distributed.FileStore(store, workers.count)  # type: ignore[attr-defined]
    backend = "nccl" if workers.gpus else "gloo"
    torch.distributed.init_process_group(backend, store=meeting, rank=rank, world_size=workers.count)
    with redirect_stdout(sys.stderr):  # losses are progress, and stdout is only for a command's result
        train(config, plan)
    # not in a `finally`: after an error, other processes would fail before this one has written its traceback
    torch.distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # skips destructors, in which a library's thread may abort the finished process


def _end_with(parent: int) -> None:
    """End this process soon after its parent is killed. Otherwise it would write to the same files as the next run."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)
