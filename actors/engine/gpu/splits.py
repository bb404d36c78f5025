"""Into how many programs attention divides a row's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.engine.working_memory import LONG_SPLITS

PER_PROCESSOR = 2  # attention programs that a multiprocessor runs at once
DEFAULT_PROCESSORS = 132  # of an H100 or H200
MOST = 16
LONG_TOKENS = 1024  # tokens of a program where every row and head has a program already, at least


@dataclass(frozen=True)
class Splits:
    """A row of n tokens has ceil(n / share) programs a head, where share = max(least, ceil(n / most)), in whole blocks.

    Args:
        most: programs of a row, at most.
        least: tokens of a program, at least.
    """

    most: int = 1
    least: int = 1


def planned_splits(lanes: int, kv_heads: int, longest: int, programs: int) -> Splits:
    """Splits for a step of so many lanes.

    Args:
        lanes: rows of the step.
        kv_heads: key/value heads.
        longest: tokens of the longest row that the cache can hold.
        programs: that the GPU runs at once, see `parallel_programs`.
    """
    free = programs // (lanes * kv_heads)
    if free > 1:
        return Splits(min(MOST, free))
    return Splits(LONG_SPLITS, LONG_TOKENS) if longest > LONG_TOKENS else Splits()


def parallel_programs(device: torch.device) -> int:
    """Attention programs that a device runs at once."""
    if device.type != "cuda":
        return PER_PROCESSOR * DEFAULT_PROCESSORS
    return PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
