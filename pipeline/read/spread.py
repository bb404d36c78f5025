"""A few rows spread over a job's input, at the cost of the beginnings of a few row groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from pipeline.read.files import InputFile
from pipeline.read.shards import Shard

SCANNED_ROWS, SCANNED_BYTES = 4096, 16 * 2**20  # of a row group, at most; a later row would cost all rows before it


def spread_rows(files: Sequence[InputFile], shards: Sequence[Shard], count: int) -> list[Shard]:
    """At most `count` rows of the shards, as shards of one row, in order and evenly spaced.

    Only rows near the beginning of a row group are taken.
    """
    ends: dict[str, int] = {}  # by file; the shards of a file cover its first rows
    for shard in shards:
        ends[shard.url] = shard.first_row + shard.rows
    begins: list[tuple[str, int]] = []
    lengths: list[int] = []
    for file in files:
        first = 0
        for rows, size in zip(file.group_rows, file.group_bytes, strict=True):
            near = min(rows, SCANNED_ROWS, max(1, rows * SCANNED_BYTES // max(size, 1)), ends.get(file.url, 0) - first)
            if near > 0:
                begins.append((file.url, first))
                lengths.append(near)
            first += rows
    starts = list(accumulate(lengths, initial=0))
    total = starts[-1]
    chosen: list[Shard] = []
    for number in range(min(count, total)):
        place = number * total // min(count, total)
        group = bisect_right(starts, place) - 1
        url, first = begins[group]
        chosen.append(Shard(number, url, first + place - starts[group], 1))
    return chosen
