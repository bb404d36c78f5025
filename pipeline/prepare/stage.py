"""The CPU stage as Ray Data runs it: whole shards; a row that kills its worker is found and gets an error."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.prepare.prompts import error_table, prepare_table
from pipeline.prepare.spec import PromptSpec
from pipeline.read.ipc import from_ipc, to_ipc
from pipeline.runtime.quarantine import Quarantine, ShardAttempt

PIECE_ROWS = 256  # in flight at once after a death: of so many rows the one that kills is then looked for


def prepare(batch: Mapping[str, Any], spec: PromptSpec, quarantine: Quarantine | None = None) -> dict[str, Any]:
    """Adds the columns of `ADDED` to the rows of shards, and the seconds it took. quarantine: without them a row that
    kills this process is met again for ever, because Ray Data tries a task without an end."""
    began = time.perf_counter()
    tables = [
        _prepare_shard(int(shard), from_ipc(rows), spec, quarantine)
        for shard, rows in zip(batch["shard"], batch["rows"], strict=True)
    ]
    seconds = (time.perf_counter() - began) / max(len(tables), 1)
    return {
        **{name: batch[name] for name in ("shard", "url", "first_row")},
        "rows": _binary([to_ipc(table) for table in tables]),
        "prepare_seconds": np.full(len(tables), seconds),
    }


def _prepare_shard(shard: int, table: pa.Table, spec: PromptSpec, quarantine: Quarantine | None) -> pa.Table:
    if quarantine is None:
        return prepare_table(table, spec)
    shard_attempt = quarantine.begin(shard, table.num_rows)
    return prepare_isolated(table, spec, shard_attempt) if shard_attempt.isolated else prepare_table(table, spec)


def prepare_isolated(table: pa.Table, spec: PromptSpec, shard_attempt: ShardAttempt) -> pa.Table:
    """`prepare_table`, piece by piece, each written down before; the same rows in the same order."""
    order = list(shard_attempt.errors)
    tables = [error_table(table.take(order), list(shard_attempt.errors.values()))] if order else []
    for group in shard_attempt.groups:
        for first in range(0, len(group), PIECE_ROWS):
            piece = group[first : first + PIECE_ROWS]
            shard_attempt.enter(piece)
            tables.append(prepare_table(table.take(list(piece)), spec))
            order += piece
    shard_attempt.enter(())
    return pa.concat_tables(tables).take(np.argsort(order))


def _binary(values: Sequence[bytes]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
