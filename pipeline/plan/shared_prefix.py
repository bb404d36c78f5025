"""The constant beginning of a job's prompts, found in a sample of rows when the job is planned."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.batching import SHORTEST_PREFIX, constant_prefix
from pipeline.config.job import StorageConfig
from pipeline.plan.memory import Hardware
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import PROMPT_IDS, prepare_table
from pipeline.read.files import InputFile
from pipeline.read.ipc import from_ipc, to_ipc
from pipeline.read.schema import conform, is_text
from pipeline.read.shards import Shard
from pipeline.read.text_files import read_text
from pipeline.runtime.isolated import Died
from pipeline.storage.folder import STORE_ERRORS, filesystem

log = logging.getLogger(__name__)
SAMPLE_ROWS = 16  # of each sampled shard
SPECIAL_TOKENS = 4  # that a tokenizer may put before a text, at most


def sampled_prefix(
    files: Sequence[InputFile],
    shards: Sequence[Shard],
    schema: pa.Schema,
    storage: StorageConfig,
    spec: PromptSpec,
    hardware: Hardware | None = None,
) -> list[int]:
    """Token ids that good rows near the start of the first, the middle and the last shard begin with; [] for none.

    Args:
        hardware: prepares the rows where a row that kills its process does no harm; there is then no prefix, and the
            quarantine finds the row when its shard runs. None prepares them here.
    """
    sampled = sorted({0, len(shards) // 2, len(shards) - 1}) if shards else []
    by_url = {file.url: file for file in files}
    tables = [_first_rows(by_url[shards[place].url], shards[place], schema, storage) for place in sampled]
    readable = [table for table in tables if table is not None]
    if any(_differ(table, spec) for table in readable):
        return []
    rows = [to_ipc(table) for table in readable]
    if hardware is None:
        return constant_prefix(prompt_ids(rows, spec))
    try:
        return constant_prefix(hardware.call_isolated(prompt_ids, rows, spec))
    except Died as error:
        log.warning("no shared prefix: the process that sampled the first prompts died (%s)", error)
        return []


def prompt_ids(tables: Sequence[bytes], spec: PromptSpec) -> list[list[int]]:
    """Token ids of the good rows of tables in IPC format."""
    prepared = [prepare_table(from_ipc(table), spec)[PROMPT_IDS].to_pylist() for table in tables]
    return [ids for ids in itertools.chain.from_iterable(prepared) if ids]


def _differ(table: pa.Table, spec: PromptSpec) -> bool:
    """Whether plain texts of a column differ so early that they cannot share `SHORTEST_PREFIX` tokens.

    A token holds at least one byte. Saves the process that tokenizes.
    """
    if spec.column is None or spec.chat is not None or not is_text(table.schema.field(spec.column).type):
        return False
    texts = [text for text in table[spec.column].cast(pa.binary()).to_pylist() if text]
    return len({text[: SHORTEST_PREFIX - SPECIAL_TOKENS] for text in texts}) > 1


def _first_rows(file: InputFile, shard: Shard, schema: pa.Schema, storage: StorageConfig) -> pa.Table | None:
    """The first rows of the row group in which the shard begins; read page by page, not the whole group.

    Of a text file, the first rows of the shard.

    None if the file cannot be read: the read task of the shard reports that.
    """
    fs, path = filesystem(shard.url, storage)
    try:
        if file.format != "parquet":
            return next(read_text([replace(shard, rows=min(shard.rows, SAMPLE_ROWS))], file, schema, storage))
        with fs.open(path, "rb") as opened:
            parquet = pq.ParquetFile(opened, buffer_size=2**16)
            ends = itertools.accumulate(
                parquet.metadata.row_group(number).num_rows for number in range(parquet.metadata.num_row_groups)
            )
            group = next((number for number, end in enumerate(ends) if shard.first_row < end), None)
            if group is None:
                return None
            batch = next(parquet.iter_batches(SAMPLE_ROWS, row_groups=[group], columns=schema.names, use_threads=False))
            return conform(pa.Table.from_batches([batch]), schema)
    except (*STORE_ERRORS, pa.ArrowException):
        return None
