"""Turns Python's garbage collector off during imports of torch and transformers, which make millions of objects.

Making the demo's `Generator`, imports included, took 8.1 and 9.9 s of CPU time without garbage collection, and 9.4 and
11.0 s with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn garbage collection off in the block or in the decorated function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
