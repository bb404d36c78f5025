"""The cache of an actor on a GPU, fixed when the job is planned: batches must be the same in every run."""

from __future__ import annotations

from dataclasses import replace

from actors.engine.checkpoint.loading import memory_needed
from actors.engine.checkpoint.weights import CACHE_STEP, cache_that_fits, check_free
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.plan.memory import Hardware

LEAST_CACHE = 2 * CACHE_STEP  # bytes; less holds hardly a row


def planned_cache(config: JobConfig, checkpoint: ResolvedCheckpoint, hardware: Hardware) -> int:
    """Bytes of cache for an actor with the paged engine: the GPU's free memory less weights and activations.

    Raises UserError of one line if there is no such GPU, or its memory does not suffice.
    """
    rows = config.rows_in_flight(has_pages=True)
    model = config.model
    need = memory_needed(
        checkpoint.checkpoint,
        model.dtype,
        0,
        checkpoint.tensors(),
        on_gpu=True,
        paged_rows=rows,
        weights=model.weights,
    )
    free, total = hardware.free_gpu_memory(config.actors)
    check_free(replace(need, cache=LEAST_CACHE), free, total)
    return cache_that_fits(need, free)
