"""Stages whose process dies of a row or while it loads the model; they replace a job's stages in tests."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.advise.estimate import read_prompts
from pipeline.answer.stage import ShardGenerator
from pipeline.prepare import prompts as prepares
from pipeline.prepare.stage import prepare

KILLER = "killer"  # a word of the deadly row's prompt
DEADLY_TOKENS = 9  # length of the deadly row's prompt
LOADS = "loads"  # a file next to the checkpoint; each load appends a line
STAYING = "staying"  # a file next to the checkpoint with the id of a process


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DeadlyGenerate(ShardGenerator):
    """Dies when a batch with the deadly row is admitted."""

    def __init__(self, *rest: Any, **named: Any) -> None:
        super().__init__(*rest, **named)
        engine = self.generator.engine
        admit = engine.admit

        def deadly(requests: Sequence[Any], prefix: Sequence[int] = ()) -> list[int]:
            if any(len(request.prompt_ids) == DEADLY_TOKENS for request in requests):
                die()
            return admit(requests, prefix)

        engine.admit = deadly  # type: ignore[method-assign]


class DeadlyLoad(ShardGenerator):
    """Dies while it loads the model."""

    def __init__(self, generator: Any, *rest: Any, **named: Any) -> None:
        from actors import generator as generators

        def deadly(checkpoint: str) -> Any:
            with (Path(checkpoint).parent / LOADS).open("a") as file:
                file.write(f"{os.getpid()}\n")
            die()

        generators.inspect = deadly  # type: ignore[assignment]
        super().__init__(generator, *rest, **named)


class StaysAtExit(ShardGenerator):
    """Its process waits for ever in an exit handler that precedes the stage's, and is named in a file."""

    def __init__(self, generator: Any, *rest: Any, **named: Any) -> None:
        atexit.register(time.sleep, 10**6)
        super().__init__(generator, *rest, **named)
        (Path(generator["checkpoint"].path).parent / STAYING).write_text(str(os.getpid()))


def deadly_prepare(*rest: Any, **named: Any) -> Iterator[Any]:
    """Dies when the deadly row is tokenized."""
    whole = prepares.tokenize

    def deadly(checkpoint: Any, texts: Sequence[str], special_tokens: bool) -> Any:
        if any(KILLER in text for text in texts):
            die()
        return whole(checkpoint, texts, special_tokens)

    prepares.tokenize = deadly
    try:
        yield from prepare(*rest, **named)
    finally:
        prepares.tokenize = whole


def deadly_row_errors(*_: Any) -> None:
    """Dies when a sample of rows is prepared while the job is planned."""
    die()


def deadly_read_prompts(shards: Sequence[Any], *rest: Any) -> Any:
    """Dies when the third shard is prepared for an estimate."""
    if any(shard.index == 2 for shard in shards):
        die()
    return read_prompts(shards, *rest)
