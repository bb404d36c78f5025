"""What a GPU of the job's Ray has room for, asked when the job is planned: batches must be the same in every run."""

from __future__ import annotations

import logging
from dataclasses import replace

import ray

from actors.engine.errors import UserError
from actors.engine.loading import memory_needed
from actors.engine.weights import CACHE_STEP, cache_that_fits, check_free
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.runtime.ray_session import check_placement, is_own_ray, planning_session

LEAST_CACHE = 2 * CACHE_STEP  # bytes; with fewer hardly a row would fit
log = logging.getLogger(__name__)


def planned_cache(config: JobConfig, located: ResolvedCheckpoint) -> int:
    """Bytes of cache for an actor of a paged engine: what its GPU has free beside weights and activations.

    Raises ValueError of one line if there is no such GPU, or no room on it.
    """
    rows = config.rows_in_flight(has_pages=True)
    need = memory_needed(located.checkpoint, config.model.dtype, 0, located.sizes(), on_gpu=True, paged_rows=rows)
    free, total = free_on_a_gpu(config.actors)
    check_free(replace(need, cache=LEAST_CACHE), free, total)
    return cache_that_fits(need, free)


def free_on_a_gpu(actors: ActorsConfig) -> tuple[int, int]:
    """Bytes that an actor may take of a GPU, and bytes of it all. A GPU that several share is shared evenly.

    Waits for a GPU where the cluster has yet to grow. ValueError if none can be had, or torch sees none.
    """
    with planning_session():
        check_placement(actors, ray.cluster_resources(), fixed=is_own_ray())
        log.info("looking at the free memory of a GPU; actors.cache_bytes would say how much of it to take")
        # its process must go before the actors come: it holds memory of the GPU as long as it lives
        ask = ray.remote(num_cpus=0, num_gpus=actors.gpus, max_calls=1)(_memory)
        free, total = ray.get(ask.remote())
    if not total:
        raise UserError(
            "actors.gpus: Ray has GPUs, but torch sees none there: install a torch built for CUDA, or set gpus: 0"
        )
    return int(free * min(1.0, actors.gpus)), total


def _memory() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)
