"""Samples rows of a new job: finds the token ids with which all sampled prompts begin (shared prefix).

A job in which no sampled row can be answered is refused.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from actors.engine.errors import UserError
from actors.engine.scheduler import SHORTEST_PREFIX, constant_prefix
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import from_ipc, read_shards, to_ipc
from pipeline.input.schema import is_text
from pipeline.input.shards import Shard
from pipeline.plan.hardware import Hardware
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.runtime.isolated import Died
from pipeline.storage.folder import STORE_ERRORS

log = logging.getLogger(__name__)
SAMPLE_ROWS = 16  # rows read from each sampled shard
LEAST_ERRORS = 32  # minimum number of sampled rows, all with an error, for which a job is refused
SPECIAL_TOKENS = 4  # maximum number of special tokens that a tokenizer puts before a text


def sampled_prefix(
    files: Sequence[InputFile],
    shards: Sequence[Shard],
    schema: pa.Schema,
    storage: StorageConfig,
    spec: PromptSpec,
    hardware: Hardware,
    refuse: bool = False,
) -> list[int]:
    """Return the token ids with which all sampled prompts begin. Rows of the first, middle and last shard are sampled.

    Rows are prepared in an isolated process. If a row kills the process, the result is []; that row will be quarantined
    when the job runs. refuse: raise UserError if at least `LEAST_ERRORS` rows were sampled and all have an error.
    """
    sampled = [shards[place] for place in sorted({0, len(shards) // 2, len(shards) - 1})] if shards else []
    by_url = {file.url: file for file in files}
    readable = []
    for place in dict.fromkeys(_beginning(by_url[shard.url], shard) for shard in sampled):
        with suppress(*STORE_ERRORS, pa.ArrowException):  # ignored, because the job's read task reports it
            readable += [table for _, table in read_shards(files, [place], schema, storage)]
    if any(_differ(table, spec) for table in readable):
        return []
    rows = [to_ipc(table) for table in readable]
    try:
        ids, errors = hardware.call_isolated(prompt_ids, rows, spec)
    except Died as error:
        log.warning("no shared prefix: the process that prepared the sampled rows died (%s); the job continues", error)
        return []
    if refuse and not ids and len(errors) >= LEAST_ERRORS:
        raise UserError(
            f"none of {len(errors):,} sampled rows can be answered; the first error: {errors[0]} "
            "(max_error_rate: 1 runs the job all the same)"
        )
    return constant_prefix(ids)


def prompt_ids(tables: Sequence[bytes], spec: PromptSpec) -> tuple[list[list[int]], list[str]]:
    """Return the prompt token ids of the rows in `tables` (Arrow IPC bytes), and the errors of the other rows."""
    prepared = [prepare_table(from_ipc(table), spec) for table in tables]
    ids, errors = (
        [one for table in prepared for one in table[name].to_pylist() if one] for name in (PROMPT_IDS, ERROR)
    )
    return ids, errors


def _differ(table: pa.Table, spec: PromptSpec) -> bool:
    """Return whether the prompt column's texts differ so early that they cannot share `SHORTEST_PREFIX` tokens.

    A token has at least one byte, so comparing the first bytes is enough. False if all texts may be too long.
    """
    column = spec.input.prompt_column
    if column is None or spec.chat is not None or not is_text(table.schema.field(column).type):
        return False
    texts = [text for text in table[column].cast(pa.binary()).to_pylist() if text]
    differ = len({text[: SHORTEST_PREFIX - SPECIAL_TOKENS] for text in texts}) > 1
    return differ and min(map(len, texts)) < spec.context_length - SPECIAL_TOKENS


def _beginning(file: InputFile, shard: Shard) -> Shard:
    """Return the rows to sample for a shard: the first rows of its first row group, which are cheapest to read."""
    if file.format != "parquet":
        return replace(shard, rows=min(shard.rows, SAMPLE_ROWS))
    starts = list(itertools.accumulate(file.group_rows, initial=0))
    group = bisect_right(starts, shard.first_row) - 1
    return Shard(0, file.url, starts[group], min(file.group_rows[group], SAMPLE_ROWS))
