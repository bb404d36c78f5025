"""Chooses the engine of a new job, and the values that determine the job's batches."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from importlib.util import find_spec

from actors.engine.errors import UserError
from actors.engine.model.loading import Checkpoint
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.messages import install_command
from pipeline.plan.hardware import Hardware

log = logging.getLogger(__name__)
GPU_CACHE_BYTES = 8 * 2**30  # KV cache of an actor on a whole GPU
SPREAD = 3  # answer lengths count as similar if the length limit is at most this many times the median length
FEW_ROWS = 16  # batches of at most this many rows are refilled: without refilling they hardly get faster as rows end


@dataclass(frozen=True)
class Batching:
    """Values that determine a job's batches. They are fixed when the job is first planned."""

    shard_rows: int  # maximum rows of a shard
    shard_bytes: int  # maximum uncompressed bytes of a shard's row groups
    cache_bytes: int  # bytes of an actor's KV cache
    max_batch: int  # maximum rows of a batch
    threads: int  # torch threads of an actor
    planned: float = 0.0  # time of planning, s since 1970; chat templates get it as the current time
    scheduler: str = "lock_step"
    root: str = ""  # folder of all input files, see `PartSpec`


def plan_batching(config: JobConfig, resolved: ResolvedCheckpoint, rows: int, hardware: Hardware | None) -> Batching:
    """Return the batching of a new job with `rows` rows. hardware: see `plan_job`."""
    actors = config.actors
    needs_node = not actors.gpus and None in (actors.threads, actors.cache_bytes)
    cpus, memory, nodes = (hardware if hardware is not None and needs_node else Hardware()).node(actors)
    per_node = math.ceil(actors.most / nodes)
    cache = int(GPU_CACHE_BYTES * min(actors.gpus, 1)) if actors.gpus else min(2**30, memory // 4 // per_node)
    if config.model.engine == "vllm" and actors.gpus:
        cache = 0  # vLLM itself takes the free memory
    # Each actor gets at least 4 shards. It gets more, up to 32, if each shard then has at least 256 rows, and at least
    # the rows in flight. With more shards, an interrupted run loses less work, and progress shows earlier.
    least = min(max(256, config.rows_in_flight), math.ceil(rows / (4 * actors.most)))
    default = min(4096, max(math.ceil(rows / (32 * actors.most)), least))
    return Batching(
        shard_rows=config.shard_rows or default,
        shard_bytes=config.shard_bytes,
        cache_bytes=actors.cache_bytes or cache,
        max_batch=config.rows_in_flight,
        threads=actors.threads or (1 if actors.gpus else max(1, cpus // per_node)),
        scheduler=chosen_scheduler(config, resolved.checkpoint),
    )


def chosen_scheduler(config: JobConfig, checkpoint: Checkpoint) -> str:
    """Return the scheduler: `actors.scheduler` if set, else lock_step for answers of similar length, else refill.

    For vLLM, return refill. Lengths are similar for labels, and for answers that end only at the length limit.
    For other answers, lock_step is chosen if the limit is at most SPREAD times the median length (the schedule's
    horizon), if batches hold more than FEW_ROWS rows, and if rows have no sampling parameters of their own.
    `tests/benchmarks/speed.py --schedulers lock_step,refill` compares the two schedulers.
    """
    if config.model.engine == "vllm":
        return "refill"
    if config.actors.scheduler is not None:
        return config.actors.scheduler
    if config.choices is not None or config.input.choices is not None:
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


def with_engine(config: JobConfig, stored: str | None) -> JobConfig:
    """Choose the engine. Return the job with `model.engine` set and, for vLLM, enough GPUs for vLLM's workers.

    stored: engine of a resumed job; `model.engine: auto` keeps it. Raises UserError if the job asks for vLLM, but vLLM
    is not installed or cannot do what the job needs.
    """
    model, gpus = config.model, config.actors.gpus
    engine: str = "vllm" if model.vllm is not None else model.engine
    if engine == "auto" and stored is not None:
        engine = stored
    elif engine == "auto" and gpus and model.device != "cpu":
        engine = "vllm" if find_spec("vllm") is not None and not_in_vllm(config) is None else engine
    if engine != "vllm":
        return config.model_copy(update={"model": model.model_copy(update={"engine": engine})})
    if find_spec("vllm") is None:
        raise UserError(f"model.engine: vllm is not installed here; run {install_command('vllm')}, or leave out vllm")
    if (reason := not_in_vllm(config)) is not None:
        raise UserError(f"model.engine: vllm: {reason}")
    workers = (model.vllm or {}).get("tensor_parallel_size", 1)
    actors = config.actors.model_copy(update={"gpus": max(gpus, float(workers)) if gpus else gpus})
    return config.model_copy(update={"model": model.model_copy(update={"engine": "vllm"}), "actors": actors})


def warn_of_engine(config: JobConfig) -> None:
    """If `model.engine: auto` does not choose vLLM on a GPU, log the reason. Call it once the job has its GPUs."""
    model = config.model
    if config.actors.gpus and model.engine == "auto" and model.vllm is None and model.device != "cpu":
        reason = f"{install_command('vllm')} for a faster one" if find_spec("vllm") is None else not_in_vllm(config)
        if reason is not None:
            log.warning("engine: builtin is used on the GPU; %s", reason)


def not_in_vllm(config: JobConfig) -> str | None:
    """Return the reason why vLLM cannot run a job, with a remedy for the user; None if it can."""
    sampling = config.sampling
    forms = (config.choices, config.output_format, config.input.choices, config.input.output_format)
    has_forms = any(form is not None for form in forms)
    for found, reason in (
        (config.model.weights is not None, "model.weights is for CPUs; leave it out, or set model.vllm.quantization"),
        (0 < config.actors.gpus < 1, "an actor needs whole GPUs: set actors.gpus: 1, or engine: builtin"),
        (sampling.temperature > 2, "sampling.temperature must be at most 2; lower it, or set engine: builtin"),
        (has_forms and config.reasoning is not None, "choices or output_format after reasoning need engine: builtin"),
        (
            has_forms and (sampling.logprobs is not None or config.output.cumulative_logprob),
            "choices or output_format with log-probabilities need engine: builtin",
        ),
    ):
        if found:
            return reason
    return None
