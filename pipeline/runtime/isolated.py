"""Calls a function in a separate process, so that a crash, a lack of memory or a hang does not affect the caller."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from actors.engine.errors import UserError
from pipeline.messages import one_line

Result = TypeVar("Result")
ROOT = str(Path(__file__).parents[2])
CHILD = "from pipeline.runtime.isolated import answer_caller; answer_caller()"


class Died(Exception):
    """The process ended without a result. The message says how it ended."""


def call_isolated(
    function: Callable[..., Result], *arguments: Any, seconds: float, memory_bytes: int | None = None
) -> Result:
    """Call a module-level function in a new Python process. Function, arguments and result must be picklable.

    seconds: time limit, after which the process is killed. memory_bytes: limit of allocated memory; None: no limit.
    If the machine's memory runs out, the kernel kills the new process first. Raises the function's error
    as a UserError or RuntimeError, or Died if the process died, was killed or exceeded a limit.
    """
    paths = [ROOT, *sys.path]  # ROOT first, because the working directory may hold another `pipeline`
    question = pickle.dumps((paths, memory_bytes)) + pickle.dumps((function, arguments))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-P", "-c", CHILD]
    try:
        process = subprocess.run(
            command, input=question, capture_output=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise Died(f"killed after {seconds:g} s") from None
    if process.returncode < 0:
        raise Died(f"killed by {signal.Signals(-process.returncode).name}")
    try:
        result: Result
        result, error = pickle.loads(process.stdout)
    except (pickle.UnpicklingError, EOFError):
        lines = process.stderr.decode(errors="replace").split("\n")
        raise Died(f"exit status {process.returncode}: {' '.join(filter(None, lines[-2:])).strip()}") from None
    if isinstance(error, MemoryError):
        raise Died("out of memory")
    if error is not None:
        raise error
    return result


def answer_caller() -> None:
    """Run in the child process: read a call from standard input, run it, and write its result to standard output."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the function's output goes to standard error
    question = io.BytesIO(sys.stdin.buffer.read())
    sys.path[:], memory_bytes = pickle.load(question)
    with suppress(OSError):  # this path exists only on Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.RLIM_INFINITY))
    function, arguments = pickle.load(question)
    outcome: tuple[Any, Exception | None]
    try:
        outcome = function(*arguments), None
    except Exception as error:  # send a copy, because pickle cannot store or rebuild some errors
        kind = next((kind for kind in (UserError, MemoryError) if isinstance(error, kind)), None)
        outcome = None, kind(str(error)) if kind else RuntimeError(one_line(error))
    pickle.dump(outcome, answer)
    answer.close()
