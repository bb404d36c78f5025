"""Each request of an OpenAI batch file has a `custom_id` of its own: results are assigned by it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.read.files import InputFile
from pipeline.read.rows import read_shards
from pipeline.read.shards import cut_shards

READ_ROWS, READ_BYTES = 4096, 64 * 2**20  # at once
ID = "custom_id"


def check_unique_ids(files: Sequence[InputFile], storage: StorageConfig) -> None:
    """Raise UserError that names the first id which two rows share. Takes 8 bytes a row, and a second pass if so."""
    hashes = array("q", (hash(value) for *_, value in _ids(files, storage)))
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    suspects = set(values[counts > 1].tolist())
    if not suspects:
        return
    seen: dict[str, tuple[str, int]] = {}
    for url, row, value in _ids(files, storage):
        if hash(value) in suspects:
            if value in seen:
                first, at = seen[value]
                where = f"row {at}" if first == url else f"row {at} of {first}"
                raise UserError(f"{url}: custom_id {value!r} of row {row} is also that of {where}; make it unique")
            seen[value] = url, row


def _ids(files: Sequence[InputFile], storage: StorageConfig) -> Iterator[tuple[str, int, str]]:
    """File, row number from 0, and id of the rows that have one."""
    schema = pa.schema([(ID, pa.string())])
    for shard, table in read_shards(files, cut_shards(files, READ_ROWS, READ_BYTES), schema, storage):
        for row, value in enumerate(table[ID].to_pylist(), shard.first_row):
            if value is not None:
                yield shard.url, row, value
