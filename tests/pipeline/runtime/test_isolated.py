"""A call in a process of its own survives whatever the function does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from actors.engine.errors import UserError
from pipeline.runtime.isolated import Died, call_isolated


def add(left: int, right: int) -> int:
    print("not the result")
    return left + right


class Refused(UserError):
    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")


def refuse() -> None:
    raise Refused("input", "wrong")


def fail() -> None:
    raise KeyError(threading.Lock())


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_silently() -> None:
    os._exit(139)


def allocate() -> int:
    return len(bytearray(8 * 2**30))


def sleep() -> None:
    time.sleep(600)


def test_a_result_and_an_error_come_back() -> None:
    assert call_isolated(add, 2, 3, seconds=600) == 5
    with pytest.raises(UserError, match=r"^input: wrong$"):
        call_isolated(refuse, seconds=600)
    with pytest.raises(RuntimeError, match=r"^KeyError: <unlocked _thread.lock"):
        call_isolated(fail, seconds=600)


@pytest.mark.parametrize(
    ("function", "says"),
    [(kill_itself, "killed by SIGKILL"), (exit_silently, "exit status 139"), (sleep, "killed after 3 s")],
)
def test_a_death_is_an_error_of_the_caller(function: Callable[[], None], says: str) -> None:
    with pytest.raises(Died, match=f"^{says}"):
        call_isolated(function, seconds=3 if function is sleep else 600)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA bounds mappings on Linux alone")
def test_memory_is_bounded() -> None:
    with pytest.raises(Died, match="out of memory"):
        call_isolated(allocate, seconds=600, memory_bytes=2**30)
