"""Computes and logs the memory that a job's actors need, and checks that there is enough. Reads no weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.engine.errors import UserError
from actors.engine.machine import process_memory
from actors.engine.model.file_digests import cache_record, write_record
from actors.engine.model.fitting import check_tensors
from actors.engine.model.loading import memory_needed
from actors.engine.model.weights import Need, StoredTensor, gib
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import ActorsConfig, JobConfig, ModelConfig
from pipeline.plan.batching import Batching
from pipeline.plan.hardware import Hardware

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


def log_memory_estimate(
    config: JobConfig, checkpoint: ResolvedCheckpoint, batching: Batching, hardware: Hardware
) -> None:
    """Log how much memory actors need. Raise UserError if this machine has too little, or if weights are damaged.

    The free memory of a GPU is not checked here: each actor checks it before loading the model.
    """
    if not checkpoint.checkpoint.in_library:
        log.info("model: vLLM checks weights and memory; at most %d rows in flight", batching.max_batch)
        return
    need = actor_need(config.model, config.actors, checkpoint, batching)
    described = describe(need, config.model.dtype, config.actors)
    log.info("%s; %s, at most %d rows in flight", described, batching.scheduler, batching.max_batch)
    if hardware.on_this_machine:
        check_fits(need, config.model, config.actors, process_memory())


def actor_need(model: ModelConfig, actors: ActorsConfig, checkpoint: ResolvedCheckpoint, batching: Batching) -> Need:
    """Return the memory that one actor needs. Raises UserError if the checkpoint's tensors do not match its config."""
    tensors = checkpoint.tensors()
    check_weights(checkpoint.checkpoint.config, tensors, model.path)
    return memory_needed(
        checkpoint.checkpoint, model.dtype, batching.cache_bytes, tensors, on_gpu=_on_gpu(model, actors)
    )


def check_weights(config: PretrainedConfig, tensors: Mapping[str, StoredTensor], name: str) -> None:
    """Raise UserError if names or shapes of `tensors` do not match `config`. name: the model's name, for messages.

    The check builds a model. It is skipped if this machine's cache records that the check has passed before.
    """
    from transformers import __version__

    record = cache_record(
        None, "tensors", [__version__, config.to_json_string(), [(key, one.shape) for key, one in tensors.items()]]
    )
    if not record.is_file():
        check_tensors(config, tensors, name)
        write_record(record, {})


def describe(need: Need, dtype: str, actors: ActorsConfig) -> str:
    """Return a line that shows the number of parameters, the memory for each actor, and the number of actors."""
    count = f"{actors.min} to {actors.max}" if actors.min is not None else str(actors.most)
    ending = "" if count == "1" else "s"
    return (
        f"model: {need.parameters / 1e6:,.1f} million parameters in {dtype}; {gib(need.total)} per actor "
        f"({_parts(need)}), {count} actor{ending}"
    )


def check_fits(need: Need, model: ModelConfig, actors: ActorsConfig, memory: int) -> None:
    """Raise UserError if actors run on CPUs, and the minimum number of actors needs more than `memory` bytes."""
    least = actors.min or actors.most
    if not _on_gpu(model, actors) and least * need.total > memory:
        raise UserError(
            f"actors: {least} x {gib(need.total)} ({_parts(need)}) do not fit in this machine's {gib(memory)} of "
            "memory: lower actors.count or actors.cache_bytes, or set model.dtype: bfloat16"
        )


def _on_gpu(model: ModelConfig, actors: ActorsConfig) -> bool:
    return actors.gpus > 0 and model.device != "cpu"


def _parts(need: Need) -> str:
    return f"weights {gib(need.weights)}, cache {gib(need.cache)}, working memory {gib(need.working)}"
