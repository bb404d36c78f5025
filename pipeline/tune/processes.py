"""A function in several processes of this machine, which end together.

An interrupt reaches the parent alone, by the handlers that it had before; it ends the others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

SECONDS = 1.0  # between looks at whether the parent lives, and at interrupts of a thread
OUT_OF_MEMORY = f"{torch.OutOfMemoryError.__module__}.{torch.OutOfMemoryError.__qualname__}: "  # of a last line


def run_processes(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, folder, *arguments)` in `count` new processes; none of them is left at the end.

    folder: a temporary one that they share.

    Raises:
        torch.OutOfMemoryError: that of a process.
        RuntimeError: a process failed or died. The text is the last line of the first one's traceback, with the type's
            name, so that a command recognizes a UserError; its cause is the whole traceback.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="skipdecode-workers-") as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            spawn.Process(target=_run, args=(rank, folder, os.getpid(), function, arguments), daemon=True)
            for rank in range(count)
        ]
        try:
            _start(processes)
            while any(one.exitcode is None for one in processes):
                wait([one.sentinel for one in processes if one.exitcode is None], SECONDS)
                if any(one.exitcode for one in processes):
                    raise _failure(processes, folder)
        finally:
            _end(processes)


def _start(processes: list[BaseProcess]) -> None:
    """Start processes that Ctrl-C in the terminal does not reach."""
    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: list[BaseProcess]) -> None:
    """A killed worker loses nothing: its output counts only once its last file is written."""
    started = [one for one in processes if one.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()


def _failure(processes: list[BaseProcess], folder: Path) -> Exception:
    """The error of the process that failed first; others then fail as they lose the connection to it."""
    files = sorted(folder.glob("*.traceback"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        rank, code = next((rank, one.exitcode) for rank, one in enumerate(processes) if one.exitcode)
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return RuntimeError(f"worker {rank} {ended}")
    text = files[0].read_text()
    line = text.strip().splitlines()[-1]
    out_of_memory = line.startswith(OUT_OF_MEMORY)
    error = torch.OutOfMemoryError(line.removeprefix(OUT_OF_MEMORY)) if out_of_memory else RuntimeError(line)
    error.__cause__ = RuntimeError(f"worker {files[0].stem}\n{text}")
    return error


def _run(rank: int, folder: Path, parent: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """A process from its start to its end; leaves its traceback in the folder if it fails.

    It ends without the libraries' destructors, where a thread of theirs may abort a process whose work is done.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        function(rank, folder, *arguments)
    except Exception:
        unfinished = folder / f"{rank}.unfinished"
        unfinished.write_text(traceback.format_exc(), errors="backslashreplace")
        unfinished.rename(folder / f"{rank}.traceback")
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(parent: int) -> None:
    """A worker whose launcher was killed would go on, and write where the next run of the same command does."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)
