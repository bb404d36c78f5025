"""Rows drawn from a job's input, uniformly and without replacement, as one Parquet file of their own."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.config.job import JobConfig
from pipeline.input.files import Files, InputFile
from pipeline.input.rows import from_ipc, read_shards, to_ipc
from pipeline.input.schema import is_text
from pipeline.input.shards import Shard
from pipeline.plan.manifest import read_footers
from pipeline.prepare.prompts import ERROR


def draw(total: int, count: int, seed: int) -> list[int]:
    """Return `count` distinct numbers below `total`, or all of them, in random order."""
    return random.Random(seed).sample(range(total), min(count, total))


def layout(config: JobConfig, listed: Files) -> tuple[list[InputFile], pa.Schema]:
    """Return the input files, and the schema of the columns that the job reads and of the references.

    Raises UserError for an unreadable file, or a column that is missing or of the wrong type.
    """
    assert config.adapt is not None
    keep = [] if config.adapt.references is None else [config.adapt.references]
    output = config.output.model_copy(update={"keep": keep})
    files, schema = read_footers(config.model_copy(update={"output": output}), listed)
    for name in keep:
        kind = schema.field(name).type
        is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        if not is_text(kind.value_type if is_list else kind):
            raise UserError(f"adapt.references: column {name!r} is {kind}; it must be string, or a list of strings")
    return files, schema


def read_sample(
    config: JobConfig, files: Sequence[InputFile], schema: pa.Schema, drawn: Sequence[int]
) -> tuple[pa.Table, list[bool]]:
    """Return the drawn rows in their order, without unreadable ones, and which rows are readable.

    drawn: row numbers over all files. Only row groups that hold a drawn row are read.
    """
    in_order, ends = sorted(drawn), accumulate((file.rows for file in files), initial=0)
    single_rows = [
        Shard(row, file.url, row - first, 1)
        for file, (first, end) in zip(files, pairwise(ends), strict=True)
        for row in in_order[bisect_left(in_order, first) : bisect_left(in_order, end)]
    ]
    rows = {  # copies: a slice would keep its whole batch in memory
        shard.index: from_ipc(to_ipc(table)) for shard, table in read_shards(files, single_rows, schema, config.storage)
    }
    readable = [rows[row][ERROR][0].as_py() is None for row in drawn]
    good = [rows[row].drop_columns(ERROR) for row, is_good in zip(drawn, readable, strict=True) if is_good]
    return pa.concat_tables([schema.empty_table(), *good]).combine_chunks(), readable
