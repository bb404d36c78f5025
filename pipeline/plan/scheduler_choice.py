"""The scheduler of a job that names none, chosen by what limits the lengths of its answers."""

from __future__ import annotations

from actors.engine.model.loading import Checkpoint
from pipeline.config.job import JobConfig

SPREAD = 3  # limit ÷ median length, up to which few answers are much longer than most
FEW_ROWS = 16  # rows of a batch, up to which a step takes about as long with fewer of them


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
