"""Everything that runs on one accelerator. `Generator` answers batches of rows, e.g. in Ray Data's `map_batches`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Generator":  # imported on first use, because its module imports torch
        from actors.generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
