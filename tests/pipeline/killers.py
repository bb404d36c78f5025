"""Rows that kill the process that works on them, for Ray's `worker_process_setup_hook`: only tests can reach it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KILLER = "killer"  # a word of the row's prompt


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_generate() -> None:
    """A row dies as soon as a batch with it is admitted, or answered alone."""
    from actors.engine.engine import Engine
    from actors.engine.types import Request

    admit = Engine.admit

    def deadly(self: Engine, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        if any(len(request.prompt_ids) == DEADLY_TOKENS for request in requests):
            _die()
        return admit(self, requests, prefix)

    Engine.admit = deadly  # type: ignore[method-assign]


DEADLY_TOKENS = 9


def in_prepare() -> None:
    """A row dies as it is tokenized."""
    from pipeline import prepare

    tokenize = prepare.tokenize

    def deadly(texts: Sequence[str], spec: Any) -> Any:
        if any(KILLER in text for text in texts):
            _die()
        return tokenize(texts, spec)

    prepare.tokenize = deadly


def in_loading() -> None:
    """An actor dies while it loads its model; each time it adds a line to the file that LOADS names."""
    from actors import generator

    def deadly(checkpoint: str) -> Any:
        with Path(os.environ["LOADS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        _die()

    generator.inspect = deadly  # type: ignore[assignment]
