"""Shards as a Ray Data source: one row per shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import read_blocks
from pipeline.input.shards import Shard, group_shards
from pipeline.run.remote import export


class ShardSource(Datasource):
    """Ray Data source of shards: one block per shard, as `read_blocks` yields them.

    A read task takes consecutive shards of one file, at most `task_rows` rows and `task_bytes` bytes of them. output:
    the job's output folder, the label of the metrics of its processes.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        files: Sequence[InputFile],
        schema: pa.Schema,
        storage: StorageConfig,
        task_rows: int,
        task_bytes: int,
        output: str,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tasks = group_shards(shards, files, task_rows, task_bytes)
        self.files = {file.url: file for file in files}
        self.schema = schema
        self.storage = storage
        self.output = output

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [self._read_task(shards) for shards in self.tasks]

    def _read_task(self, shards: list[Shard]) -> ReadTask:
        # without a reference to self, which would be pickled into every task
        read = partial(_read, self.output, shards, self.files[shards[0].url], self.schema, self.storage)
        metadata = BlockMetadata(num_rows=len(shards), size_bytes=None, input_files=(shards[0].url,), exec_stats=None)
        return ReadTask(read, metadata)


def _read(
    output: str, shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """A read task, in a worker process."""
    export(output)
    yield from read_blocks([file], shards, schema, storage)
