"""Describes a job's stages and the backends that can run them. Does not import ray.

prepare ──> generate        each batch that a stage passes to the next one holds one shard
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from pipeline.answer.coordinator import Coordinator, Workload
from pipeline.answer.stage import ShardGenerator, Worker
from pipeline.commit.sink import check_output, commit_shard
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.input.files import InputFile
from pipeline.input.shards import Shard
from pipeline.plan.batching import Batching
from pipeline.plan.hardware import Hardware
from pipeline.plan.job import PlannedJob, part_spec
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.prepare.stage import prepare
from pipeline.runtime.quarantine import STAGE_NAMES, Quarantine
from pipeline.storage.folder import Folder

ROWS_OF_SLOT = 4  # minimum ratio of rows sent to an actor with vLLM to its rows in flight, if the shards allow it
QUARANTINED_RETRIES = 1000  # retries of a prepare task or an actor call; high, because `Quarantine` limits deaths


Prepare = Callable[[Sequence[Shard], Sequence[InputFile]], Iterator[pa.Table]]


@dataclass(frozen=True)
class Stages:
    """The stages of a run, and their arguments."""

    shards: Sequence[Shard]  # the shards to answer
    files: Sequence[InputFile]  # the files that hold them
    prepare: Prepare  # function that reads and prepares shards, and yields a table for each
    generator: Callable[..., Callable[[Any], Any]]  # class; each actor calls an instance of it for each batch
    arguments: Mapping[str, Any]  # arguments of `generator`
    actors: ActorsConfig
    calls: int  # number of batches that an actor works on at the same time, each in its own thread


class Session(Protocol):
    """A started backend, with the objects that stages need."""

    coordinator: Coordinator
    worker: Worker

    def run(self, stages: Stages, workload: Workload, grace_seconds: float) -> None:
        """Run the stages to their end. After a signal, wait `grace_seconds` for running shards; raise Interrupted."""


class Backend(Hardware):
    """Runs the stages of jobs. starts_workers: whether separate processes read and prepare rows."""

    starts_workers = False

    def ready(self, actors: ActorsConfig) -> AbstractContextManager[None]:
        """Keep the backend started during the `with` block, so that calls in the block do not start it again."""
        return nullcontext()

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[Session]:
        """Start a session. output: label of the metrics. Raises UserError if the actors can never be placed."""
        raise NotImplementedError


def job_stages(job: PlannedJob, folder: Folder, shards: list[Shard], session: Session) -> Stages:
    """Return the stages of a run that answers `shards`."""
    config, manifest, coordinator, run = job.config, job.manifest, session.coordinator, uuid.uuid4().hex
    preparing, generating = (Quarantine(folder, run, config.attempts, stage) for stage in STAGE_NAMES)
    spec = prompt_spec(config, job.checkpoint, manifest.batching.planned)
    generate = {
        "settings": job.settings,
        "part": part_spec(job),
        "commit": partial(commit_shard, folder=folder, fingerprint=manifest.fingerprint, coordinator=coordinator),
        "check_output": partial(check_output, folder, manifest.fingerprint),
        "coordinator": coordinator,
        "quarantine": generating,
        "worker": session.worker,
        "devices": config.actors.gpus or 1.0,
        "price_per_hour": config.price_per_hour or 0.0,
    }
    return Stages(
        shards,
        manifest.files,
        partial(prepare, schema=manifest.schema, storage=config.storage, spec=spec, quarantine=preparing),
        ShardGenerator,
        generate,
        config.actors,
        calls=_calls(config, manifest.batching, len(shards)),
    )


def _calls(config: JobConfig, batching: Batching, shards: int) -> int:
    """Return the number of shards that an actor works on at the same time.

    One shard if answers must be reproducible; else two, of which one is committed. With vLLM, rows of all shards share
    steps. While a long row of the oldest shard runs, no other shard is committed, so the others together have at least
    `ROWS_OF_SLOT` rows for each slot; but an actor gets no more than its share of the run's shards.
    """
    if config.model.engine == "vllm":
        others = math.ceil(ROWS_OF_SLOT * batching.max_batch / batching.shard_rows)
        return max(2, min(1 + others, shards // config.actors.most))
    return 2 if batching.scheduler == "refill" and config.model.dtype != "float32" else 1
