"""A job's stages as data, and what a backend must offer to run them. Imports no ray.

Between two stages travels a batch that holds one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from pipeline.config.job import ActorsConfig, StorageConfig
from pipeline.generate.coordinator import Coordinator, Workload
from pipeline.generate.stage import Worker
from pipeline.plan.hardware import Hardware
from pipeline.read.files import InputFile
from pipeline.read.shards import Shard


@dataclass(frozen=True)
class Read:
    """Reads shards of the input, in the job's schema."""

    shards: Sequence[Shard]
    files: Sequence[InputFile]
    schema: pa.Schema
    storage: StorageConfig


@dataclass(frozen=True)
class Tasks:
    """A function over batches, without state.

    Args:
        function: called with a batch and `arguments`.
        retries: of a task whose process died, or whose result was lost with its node.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    retries: int


@dataclass(frozen=True)
class Actors:
    """A callable class over batches: constructed once per actor with `arguments`.

    Args:
        retries: of a batch whose actor died.
        calls: that an actor takes at once, each in a thread of its own.
    """

    callable_class: type
    arguments: Mapping[str, Any]
    actors: ActorsConfig
    retries: int
    calls: int = 1


Stage = Read | Tasks | Actors


class Session(Protocol):
    """A backend at work: everything that stages need while they are built and run."""

    coordinator: Coordinator
    worker: Worker

    def run(self, stages: Sequence[Stage], workload: Workload, grace_seconds: float) -> None:
        """Run the stages to their end. Raises Interrupted after a signal.

        grace_seconds: for shards at work after a first signal.
        """
        ...


class Backend(Hardware):
    """Where a job runs. starts_workers: whether processes of its own read and prepare rows."""

    starts_workers = False

    def ready(self, actors: ActorsConfig) -> AbstractContextManager[None]:
        """Start what `call_as_actor` and a session run on, once for all within the block."""
        return nullcontext()

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[Session]:
        """Start what the stages run on. UserError if the actors can never be placed.

        output: the job's output folder, the label of its metrics.
        """
        raise NotImplementedError
