"""Refuses a new job in which no sampled row can be answered. Rows are prepared in a process of their own."""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import from_ipc, read_shards, to_ipc
from pipeline.input.schema import is_text, split_errors
from pipeline.input.shards import Shard
from pipeline.plan.hardware import Hardware
from pipeline.prepare.prompt_spec import PromptSpec, read_names
from pipeline.prepare.prompts import ERROR, prepare_table
from pipeline.runtime.isolated import Died
from pipeline.storage.folder import STORE_ERRORS

log = logging.getLogger(__name__)
SAMPLE_ROWS = 16  # rows read from each sampled shard
LEAST_ERRORS = 32  # minimum number of sampled rows, all with an error, for which a job is refused
SPECIAL_TOKENS = 4  # maximum number of special tokens that a tokenizer adds to a text


def check_sample(
    files: Sequence[InputFile],
    shards: Sequence[Shard],
    schema: pa.Schema,
    storage: StorageConfig,
    spec: PromptSpec,
    hardware: Hardware,
) -> None:
    """Raise UserError if at least `LEAST_ERRORS` rows of the first, middle and last shard are sampled, and all fail.

    If a row kills the process that prepares the sample, the job is not refused: that row is quarantined when it runs.
    """
    sampled = [shards[place] for place in sorted({0, len(shards) // 2, len(shards) - 1})] if shards else []
    by_url = {file.url: file for file in files}
    tables = []
    for place in dict.fromkeys(_beginning(by_url[shard.url], shard) for shard in sampled):
        with suppress(*STORE_ERRORS, pa.ArrowException):  # ignored, because the job's read task reports it
            tables += [table for _, table in read_shards(files, [place], schema, storage)]
    if sum(table.num_rows for table in tables) < LEAST_ERRORS or any(_has_prompt(table, spec) for table in tables):
        return
    try:
        errors = hardware.call_isolated(row_errors, [to_ipc(table) for table in tables], spec)
    except Died as error:
        log.warning("the process that prepared the sampled rows died (%s); the job continues", error)
        return
    if None not in errors:
        raise UserError(
            f"none of {len(errors):,} sampled rows can be answered; the first error: {errors[0]} "
            "(max_error_rate: 1 runs the job all the same)"
        )


def row_errors(tables: Sequence[bytes], spec: PromptSpec) -> list[str | None]:
    """Return the error of each row in `tables` (Arrow IPC bytes); None for a row that can be answered."""
    return [error for table in tables for error in prepare_table(from_ipc(table), spec)[ERROR].to_pylist()]


def _has_prompt(table: pa.Table, spec: PromptSpec) -> bool:
    """Return whether a row is a text that surely fits the context, and no other column can make an error of it.

    A token has at least one byte.
    """
    column = spec.input.prompt_column
    if column is None or spec.chat is not None or [*read_names(spec.input)] != [column]:
        return False
    if not is_text(table.schema.field(column).type):
        return False
    room = spec.context_length - SPECIAL_TOKENS - max((len(label.encode()) for label in spec.choices), default=0)
    texts, errors = table[column].to_pylist(), split_errors(table)[1]
    good = (text for text, error in zip(texts, errors, strict=True) if text and error is None)
    return any(text.strip() and len(text.encode()) < room for text in good)


def _beginning(file: InputFile, shard: Shard) -> Shard:
    """Return the rows to sample for a shard: the first rows of its first row group, which are cheapest to read."""
    if file.format != "parquet":
        return replace(shard, rows=min(shard.rows, SAMPLE_ROWS))
    starts = list(itertools.accumulate(file.group_rows, initial=0))
    group = bisect_right(starts, shard.first_row) - 1
    return Shard(0, file.url, starts[group], min(file.group_rows[group], SAMPLE_ROWS))
