"""The prepare stage: reads shards and turns rows into prompts. A row that kills its process gets an error.

Does not import Ray.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from pipeline import metrics
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import read_shards, to_ipc
from pipeline.input.shards import Shard
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import error_table, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

# time limit of a table: a constant + time for its rows + time for its bytes. Ends a process with an endless template
DEADLINE_SECONDS, SECONDS_PER_ROW, BYTES_PER_SECOND = 20.0, 0.05, 1e5


def prepare(
    shards: Sequence[Shard],
    files: Sequence[InputFile],
    schema: pa.Schema,
    storage: StorageConfig,
    spec: PromptSpec,
    quarantine: Quarantine,
) -> Iterator[pa.Table]:
    """Read shards, and turn their rows into prompts. Yield a table of one row per shard, which Ray Data never splits.

    Columns: `shard` (index), `url`, `first_row`, `rows` (rows with their prompts, as Arrow IPC bytes), and
    `prepare_seconds`. quarantine: finds rows that kill their process. Without it, Ray would retry them for ever.
    """
    # in a worker, tokenize in one thread: Ray runs several workers on a machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tables = read_shards(files, shards, schema, storage)
    for shard in shards:
        yield _prepared(shard, tables, spec, quarantine)


def _prepared(
    shard: Shard, tables: Iterator[tuple[Shard, pa.Table]], spec: PromptSpec, quarantine: Quarantine
) -> pa.Table:
    """Read the next shard from `tables`, and return it with its prompts (see `prepare`)."""
    attempt = quarantine.begin(shard.index, shard.rows)  # must precede any step that may kill this process
    _, table = next(tables)
    began = time.perf_counter()
    if attempt.isolated:
        prepared = prepare_isolated(table, spec, attempt)
    else:
        with _deadline(table, spec):
            prepared = prepare_table(table, spec)
    attempt.end()
    seconds = time.perf_counter() - began
    metrics.add("seconds", seconds, part="prepare")
    place = {"shard": [shard.index], "url": [shard.url], "first_row": [shard.first_row]}
    return pa.table({**place, "rows": pa.array([to_ipc(prepared)], pa.large_binary()), "prepare_seconds": [seconds]})


@contextmanager
def _deadline(table: pa.Table, spec: PromptSpec) -> Iterator[None]:
    """End this process if the `with` block exceeds the table's time limit. A later attempt finds the row that hangs."""
    tokenizer_of(spec.checkpoint)  # loaded before the time limit begins
    seconds = DEADLINE_SECONDS + SECONDS_PER_ROW * table.num_rows + table.nbytes / BYTES_PER_SECOND
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def prepare_isolated(table: pa.Table, spec: PromptSpec, attempt: ShardAttempt) -> pa.Table:
    """Prepare a shard on which a process has died. Record each group of rows before preparing it. Keep the order."""
    order = list(attempt.errors)
    tables = [error_table(table.take(order), list(attempt.errors.values()))] if order else []
    for group in attempt.groups:
        attempt.enter(group)
        part = table.take(list(group))
        with _deadline(part, spec):
            tables.append(prepare_table(part, spec))
        order += group
    attempt.enter(())
    return pa.concat_tables(tables).take(np.argsort(order))
