"""The code of one accelerator. `actors.Generator` answers batches of rows in any program's `map_batches`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Generator":  # on first use: it brings torch along
        from actors.generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
