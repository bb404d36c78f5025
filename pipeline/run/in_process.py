"""The stages one after the other in this process: for `skipdecode try` and for tests. Imports no ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from pipeline.config.job import ActorsConfig
from pipeline.generate.coordinator import Coordinator, Workload
from pipeline.generate.stage import Worker
from pipeline.input.rows import read_blocks
from pipeline.run.stages import Backend, Read, Stage, Tasks
from pipeline.runtime.signals import Interrupted, graceful


class InProcess(Backend):
    """Backend of one process: one actor, no retries. A row that kills the process kills the caller."""

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[InProcessSession]:
        return nullcontext(InProcessSession())


class InProcessSession:
    """See `Session`."""

    def __init__(self) -> None:
        self.coordinator, self.worker = Coordinator(), Worker()

    def run(self, stages: Sequence[Stage], workload: Workload, grace_seconds: float) -> None:
        batches: Iterator[Any] = iter(())
        for stage in stages:
            if isinstance(stage, Read):
                batches = self._read(stage)
            elif isinstance(stage, Tasks):
                batches = map(partial(stage.function, **stage.arguments), batches)
            else:
                batches = map(stage.callable_class(**stage.arguments), batches)
        with graceful(grace_seconds, self.coordinator.stop, self.coordinator.working) as grace:
            for _ in batches:
                pass
        if grace.signal is not None:
            raise Interrupted(grace.signal)

    def _read(self, stage: Read) -> Iterator[dict[str, Any]]:
        for block in read_blocks(stage.files, stage.shards, stage.schema, stage.storage):
            if self.coordinator.stopped:
                return
            yield {name: block[name].to_numpy() for name in block.column_names}
