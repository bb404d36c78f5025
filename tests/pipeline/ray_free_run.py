"""A whole run without Ray and without a model: everything is real but the stages; the parts are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from in_process import InProcess, InProcessSession
from part_builders import commit_made_up_parts

from pipeline import job as jobs
from pipeline.answer.coordinator import Workload
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.input.shards import Shard
from pipeline.run.stages import Stages
from pipeline.storage.folder import Folder

Answer = Callable[[Sequence[Shard], Folder, str], None]  # shards, output folder, fingerprint


class MadeUpParts(InProcess):
    """A backend that does `answer` in place of the stages."""

    def __init__(self, answer: Answer = commit_made_up_parts) -> None:
        self.answer = answer

    @contextmanager
    def session(self, actors: ActorsConfig, output: str) -> Iterator[InProcessSession]:
        yield MadeUpSession(self.answer)


class MadeUpSession(InProcessSession):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def run(self, stages: Stages, workload: Workload, grace_seconds: float) -> None:
        commit = stages.arguments["commit"].keywords
        self.answer(stages.shards, commit["folder"], commit["fingerprint"])


def run(values: dict[str, Any]) -> None:
    """Run a job, given as JobConfig's values."""
    jobs.run(JobConfig.model_validate(values), backend=MadeUpParts())
