"""Runs the stages one after the other in this process, for `skipdecode try` and tests. Imports no ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipeline.config.job import ActorsConfig
from pipeline.generate.coordinator import Coordinator, Workload
from pipeline.generate.stage import Worker
from pipeline.input.rows import read_blocks
from pipeline.run.stages import Backend, Read, Stages
from pipeline.runtime.signals import Interrupted, graceful


class InProcess(Backend):
    """Backend of one process: one actor, no retries. A row that kills the process kills the caller."""

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[InProcessSession]:
        return nullcontext(InProcessSession())


class InProcessSession:
    """See `Session`."""

    def __init__(self) -> None:
        self.coordinator, self.worker = Coordinator(), Worker()

    def run(self, stages: Stages, workload: Workload, grace_seconds: float) -> None:
        answered = map(stages.generator(**stages.arguments), map(stages.prepare, self._batches(stages.read)))
        with graceful(grace_seconds, self.coordinator.stop, self.coordinator.working) as grace:
            for _ in answered:
                pass
        if grace.signal is not None:
            raise Interrupted(grace.signal)

    def _batches(self, read: Read) -> Iterator[dict[str, Any]]:
        for block in read_blocks(read.files, read.shards, read.schema, read.storage):
            if self.coordinator.stopped:
                return
            yield {name: block[name].to_numpy() for name in block.column_names}
