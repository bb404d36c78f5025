"""The constant beginning of a job's prompts, found in a few rows when the job is planned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.batching import constant_prefix
from pipeline.config.job import StorageConfig
from pipeline.prepare.prompts import PROMPT_IDS, PromptSpec, prepare_table
from pipeline.read.schema import conform
from pipeline.read.shards import Shard
from pipeline.storage.folder import STORE_ERRORS, filesystem

SAMPLE_ROWS = 16  # of each shard that is looked at


def sampled_prefix(shards: Sequence[Shard], schema: pa.Schema, storage: StorageConfig, spec: PromptSpec) -> list[int]:
    """The constant prefix of good rows near the first, the middle and the last shard's start; [] without any."""
    places = sorted({0, len(shards) // 2, len(shards) - 1}) if shards else []
    prompts: list[list[int]] = []
    for place in places:
        rows = _first_rows(shards[place], schema, storage)
        if rows is not None:
            prompts += [ids for ids in prepare_table(rows, spec)[PROMPT_IDS].to_pylist() if ids]
    return constant_prefix(prompts)


def _first_rows(shard: Shard, schema: pa.Schema, storage: StorageConfig) -> pa.Table | None:
    """The first rows of the row group in which the shard begins; read page by page, not the whole group.

    None if the file cannot be read: that is told where the shard itself is read.
    """
    fs, path = filesystem(shard.url, storage)
    try:
        with fs.open(path, "rb") as file:
            parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**16)
            ends = itertools.accumulate(
                parquet.metadata.row_group(number).num_rows for number in range(parquet.metadata.num_row_groups)
            )
            group = next((number for number, end in enumerate(ends) if shard.first_row < end), None)
            if group is None:
                return None
            batch = next(parquet.iter_batches(SAMPLE_ROWS, row_groups=[group], columns=schema.names))
            return conform(pa.Table.from_batches([batch]), schema)
    except (*STORE_ERRORS, pa.ArrowException):
        return None
