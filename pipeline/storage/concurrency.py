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
    """Results of a function in the order of the items. Raises the error of the first item that fails."""
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH)):
        pool = ThreadPoolExecutor(min(threads, len(batch)))
        try:
            yield from pool.map(function, batch)
        finally:
            pool.shutdown(cancel_futures=True)
