"""Values that shape a job's batches, fixed when it is first planned."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.engine.machine import process_cpus, process_memory
from actors.engine.model.loading import Checkpoint
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.plan.hardware import Hardware

GPU_CACHE_BYTES = 8 * 2**30  # cache of an actor on a whole GPU
SPREAD = 3  # limit ÷ median length, up to which few answers are much longer than most
FEW_ROWS = 16  # rows of a batch, up to which a step takes about as long with fewer of them


@dataclass(frozen=True)
class Batching:
    """Values that shape batches, fixed when the job is first planned.

    Args:
        shard_rows: rows of a shard, at most.
        shard_bytes: uncompressed bytes of a shard's row groups, at most.
        cache_bytes: key-value cache of an actor.
        max_batch: rows of a batch, at most.
        threads: torch threads of an actor.
        prefix: token ids that all prompts begin with, computed once per actor; () for none.
        planned: time of planning, seconds since 1970; the present time for chat templates.
        scheduler: name in actors.engine.loop.
        root: see `PartSpec`; None in a job that an earlier version planned.
        retries: the shards hold only rows that had an error in an earlier incremental run.
    """

    shard_rows: int
    shard_bytes: int
    cache_bytes: int
    max_batch: int
    threads: int
    prefix: tuple[int, ...] = ()
    planned: float = 0.0
    scheduler: str = "lock_step"
    root: str | None = None
    retries: bool = False


def plan_batching(config: JobConfig, resolved: ResolvedCheckpoint, rows: int, hardware: Hardware | None) -> Batching:
    """Batching of a new job over `rows` rows, without a shared prefix. hardware: as for `plan_job`."""
    actors = config.actors
    cpus, memory, nodes = process_cpus(), process_memory(), 1
    if hardware is not None and not actors.gpus and None in (actors.threads, actors.cache_bytes):
        cpus, memory, nodes = hardware.node(actors)
    of_node = math.ceil(actors.most / nodes)
    cache = int(GPU_CACHE_BYTES * min(actors.gpus, 1)) if actors.gpus else min(2**30, memory // 4 // of_node)
    return Batching(
        shard_rows=config.shard_rows or min(4096, math.ceil(rows / (4 * actors.most))),
        shard_bytes=config.shard_bytes,
        cache_bytes=actors.cache_bytes or cache,
        max_batch=config.rows_in_flight,
        threads=actors.threads or (1 if actors.gpus else max(1, cpus // of_node)),
        scheduler=chosen_scheduler(config, resolved.checkpoint),
    )


def chosen_scheduler(config: JobConfig, checkpoint: Checkpoint) -> str:
    """`actors.scheduler`, else lock_step for answers of similar length, else refill.

    Labels have similar lengths; so have answers that end only at their limit. Other answers have if the limit is at
    most SPREAD times their median length (the schedule's horizon) and batches hold more than FEW_ROWS rows, unless
    rows bring their own limits. `tests/benchmarks/speed.py --schedulers lock_step,refill` compares both.
    """
    if config.actors.scheduler is not None:
        return config.actors.scheduler
    if config.choices is not None:
        return "lock_step"
    if config.input.sampling is not None:
        return "refill"
    sampling = config.sampling
    if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        return "lock_step"
    stored = None if checkpoint.spec is None else checkpoint.spec.horizon
    median = config.schedule.horizon or stored
    is_similar = median is not None and sampling.max_new_tokens <= SPREAD * median
    return "lock_step" if is_similar and config.rows_in_flight > FEW_ROWS else "refill"
