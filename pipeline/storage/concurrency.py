"""Many small requests in parallel: an object store answers hundreds in hardly more time than one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
THREADS = 32
BATCH = 1024  # items submitted together, so that an error is raised soon and results do not accumulate


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS) -> Iterator[Result]:
    """Call `function` on every item in up to `threads` threads, and yield the results in the order of the items.

    Lazy: nothing runs until the results are consumed. Items are submitted `BATCH` at a time. The error of an item is
    raised in place of its result; calls that have not started by then are cancelled, running ones are waited for.
    """
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH)):
        pool = ThreadPoolExecutor(min(threads, len(batch)))
        try:
            yield from pool.map(function, batch)
        finally:
            pool.shutdown(cancel_futures=True)
