"""Many small requests at once: an object store answers one in milliseconds and hundreds in hardly more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
THREADS = 32
AT_ONCE = 1024  # items handed out at a time, so that an error is raised soon and results do not pile up


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS) -> Iterator[Result]:
    """Results in the order of the items. Raises what the first item that fails raises."""
    left = iter(items)
    while some := list(islice(left, AT_ONCE)):
        pool = ThreadPoolExecutor(min(threads, len(some)))
        try:
            yield from pool.map(function, some)
        finally:
            pool.shutdown(cancel_futures=True)
