"""Shards as a Ray Data source: one row per shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from pipeline import metrics
from pipeline.input.rows import read_blocks
from pipeline.input.shards import group_shards
from pipeline.run.remote import RayMetrics
from pipeline.run.stages import Read


class ShardSource(Datasource):
    """Ray Data source of shards: one block per shard, as `read_blocks` yields them.

    Args:
        read: the shards. A read task takes consecutive shards of one file.
        task_rows, task_bytes: limits of a read task, unless one shard has more.
        output: the job's output folder, the label of its metrics.
    """

    def __init__(self, read: Read, task_rows: int, task_bytes: int, output: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        files = {file.url: file for file in read.files}
        groups = group_shards(read.shards, read.files, task_rows, task_bytes)
        self.tasks = [replace(read, shards=shards, files=[files[shards[0].url]]) for shards in groups]
        self.output = output

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        return [
            ReadTask(  # refers not to self, which would be pickled into every task
                partial(_read, task, self.output),
                BlockMetadata(len(task.shards), size_bytes=None, input_files=(task.files[0].url,), exec_stats=None),
            )
            for task in self.tasks
        ]


def _read(task: Read, output: str) -> Iterator[pa.Table]:
    """Read shards, in a worker process."""
    metrics.install(RayMetrics(output))
    yield from read_blocks(task.files, task.shards, task.schema, task.storage)
