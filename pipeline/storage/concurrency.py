"""Runs work in threads: many calls in parallel, or one call repeatedly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
THREADS = 32
BATCH = 1024  # maximum number of items submitted at once, so that errors come soon and few results wait in memory


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS) -> Iterator[Result]:
    """Call `function` on every item in up to `threads` threads, and yield the results in the order of the items.

    An object store answers hundreds of parallel requests almost as fast as one. No call starts before the first result
    is requested. If a call raises an error, this function raises it in place of the result. First it cancels calls
    that have not started, and waits for running calls.
    """
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH)):
        pool = ThreadPoolExecutor(min(threads, len(batch)))
        try:
            yield from pool.map(function, batch)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def repeating(action: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call `action` every `seconds` in a thread while the `with` block runs."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
