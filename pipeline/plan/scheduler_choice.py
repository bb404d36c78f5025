"""Which scheduler a job gets where it names none: what is known of its answers' lengths before there are any."""

from __future__ import annotations

from actors.engine.loading import Checkpoint
from pipeline.config.job import JobConfig

SPREAD = 3  # limit ÷ median up to which few answers are much longer than most
FEW_ROWS = 16  # in flight, up to which a step takes about as long however many of them are left


def chosen_scheduler(config: JobConfig, checkpoint: Checkpoint) -> str:
    """`actors.scheduler`, else lock_step for answers that are alike, else refill.

    Labels are alike, and answers that nothing ends before their limit. So are answers whose limit is at most SPREAD
    times their median, which is the schedule's horizon, if more than FEW_ROWS are in flight; but limits that rows
    bring themselves may be any. `tests/benchmarks/speed.py --schedulers lock_step,refill` measures which one is faster.
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
    alike = median is not None and sampling.max_new_tokens <= SPREAD * median
    return "lock_step" if alike and config.rows_in_flight(checkpoint.has_pages) > FEW_ROWS else "refill"
