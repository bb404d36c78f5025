"""Jobs with slow stages, so that a kill hits them at work; the answers stay the same.

    python tests/pipeline/slow_stages.py run job.yaml

is `skipdecode run job.yaml` with slow stages.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.cli.app import main
from pipeline.run import stages

HOLD = "SKIPDECODE_TEST_HOLD"  # a variable of the environment: while that file exists, a job writes two parts


@dataclass(frozen=True)
class Slowness:
    """Seconds added for each shard: to prepare, to answer, and between its part and its record."""

    prepare: float = 0.05
    answer: float = 0.3
    commit: float = 0.1


@contextmanager
def slowed(by: Slowness) -> Iterator[None]:
    """Jobs started in this context are slow. The stages are pickled by value: workers cannot import this file."""
    kept = {name: getattr(stages, name) for name in ("prepare", "ShardGenerator", "commit_shard")}
    stages.prepare = _prepare(by.prepare)  # type: ignore[attr-defined]
    stages.ShardGenerator = _shard_generator(by.answer)  # type: ignore[attr-defined]
    stages.commit_shard = _commit_shard(by.commit)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(stages, name, value)


def _prepare(seconds: float) -> Any:
    original = stages.prepare  # type: ignore[attr-defined]

    @functools.wraps(original)
    def prepare(*arguments: Any, **named: Any) -> Any:
        for block in original(*arguments, **named):
            time.sleep(seconds)
            yield block

    prepare.__module__ = "__main__"  # otherwise it is pickled by a name that leads to the original
    return prepare


def _shard_generator(seconds: float) -> Any:
    class ShardGenerator(stages.ShardGenerator):  # type: ignore[name-defined, misc]
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            time.sleep(seconds / 2)
            answered = super().__call__(*arguments, **named)
            time.sleep(seconds / 2)
            return answered

    return ShardGenerator


def _commit_shard(seconds: float) -> Any:
    class SlowFolder:
        def __init__(self, folder: Any) -> None:
            self.folder = folder

        def __getattr__(self, name: str) -> Any:
            return getattr(self.folder, name)

        def has_two_parts(self) -> bool:
            return sum(name.endswith(".parquet") for name in self.folder.names()) >= 2

        def create(self, name: str, data: bytes) -> bool:
            while name.endswith(".parquet") and os.path.exists(os.environ.get(HOLD, "")) and self.has_two_parts():
                time.sleep(0.05)
            created: bool = self.folder.create(name, data)
            if name.endswith(".parquet"):
                time.sleep(seconds)
            return created

    original = stages.commit_shard  # type: ignore[attr-defined]

    def commit_shard(*arguments: Any, folder: Any, **named: Any) -> Any:
        return original(*arguments, folder=SlowFolder(folder), **named)

    commit_shard.__module__ = "__main__"  # as above
    return commit_shard


if __name__ == "__main__":
    with slowed(Slowness()):
        main()
