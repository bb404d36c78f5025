"""Turns Python's garbage collector off during the imports of torch and transformers. They create millions of objects.

Creating the demo's `Generator`, including imports, took 8.1 and 9.9 s of CPU time without garbage collection (two
runs), and 9.4 and 11.0 s with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn garbage collection off inside the `with` block or the decorated function."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
