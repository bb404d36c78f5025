"""Runs the prepare stage, which turns rows into prompts. A row that kills its process gets an error. Imports no ray."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import metrics
from pipeline.input.rows import from_ipc, to_ipc
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import error_table, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

# time limit of a table: a constant + time for its rows + time for its bytes. Ends a process with an endless template
DEADLINE_SECONDS, SECONDS_PER_ROW, BYTES_PER_SECOND = 20.0, 0.05, 1e5


def prepare(batch: Mapping[str, Any], spec: PromptSpec, quarantine: Quarantine) -> dict[str, Any]:
    """Turn the rows of each shard into prompts. Return the columns of `batch` and the new column `prepare_seconds`.

    Args:
        batch: Columns shard, url, first_row and rows (Arrow IPC bytes, to which the prompts are added).
        quarantine: Finds rows that kill their process. Without it, Ray Data would retry such a row for ever.
    """
    # in a worker, tokenize in one thread: Ray runs several workers on a machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.perf_counter()
    tables = [
        _prepare_shard(int(shard), from_ipc(rows), spec, quarantine)
        for shard, rows in zip(batch["shard"], batch["rows"], strict=True)
    ]
    seconds = time.perf_counter() - began
    metrics.add("seconds", seconds, part="prepare")
    rows = np.empty(len(tables), dtype=object)
    rows[:] = [to_ipc(table) for table in tables]
    return {
        **{name: batch[name] for name in ("shard", "url", "first_row")},
        "rows": rows,
        "prepare_seconds": np.full(len(tables), seconds / max(len(tables), 1)),
    }


def _prepare_shard(shard: int, table: pa.Table, spec: PromptSpec, quarantine: Quarantine) -> pa.Table:
    attempt = quarantine.begin(shard, table.num_rows)
    if attempt.isolated:
        return prepare_isolated(table, spec, attempt)
    with _deadline(table, spec):
        return prepare_table(table, spec)


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
