"""Workers that fail or never end. They import no Trainer, which takes seconds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from actors.engine.errors import UserError


def sleep(rank: int, folder: Path) -> None:
    (folder / f"started-{rank}-{os.getpid()}").touch()
    time.sleep(600)


def wrong_value(rank: int) -> None:
    if rank == 0:
        time.sleep(600)
    raise ValueError("two\nlines")


def user_error(rank: int) -> None:
    raise UserError("data: too few rows")


def out_of_memory(rank: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def killed(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
