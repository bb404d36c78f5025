"""Runs a model on one device. `Generator` answers batches of prompts, e.g. in Ray Data's `map_batches`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Generator":  # imported on first use, because its module imports torch
        from actors.generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
