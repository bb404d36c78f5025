"""Draws rows from a job's input, with the columns that scoring and training need, and makes their prompts."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.config.adapt import OF_TEXTS
from pipeline.config.forms import normalized
from pipeline.config.job import JobConfig
from pipeline.input.files import Files, InputFile
from pipeline.input.rows import from_ipc, read_shards, to_ipc
from pipeline.input.schema import is_text
from pipeline.input.shards import Shard
from pipeline.plan.manifest import read_footers
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table

SEED = 0  # random seed with which rows are drawn


def check_scorable(config: JobConfig) -> None:
    """Raise UserError for a job whose answers cannot be scored, or not with `adapt.metric`."""
    if config.input.is_batch:
        raise UserError("input.format: openai_batch files cannot be scored; use a table of messages")
    unscored = {
        "input.choices": config.input.choices,
        "input.tools": config.input.tools,
        "output_format": config.output_format,
        "input.output_format": config.input.output_format,
        "reasoning": config.reasoning,
    }
    for key, value in unscored.items():
        if value is not None:
            raise UserError(
                f"{key}: only free text and the labels in choices can be scored; leave this key out, and add it to the "
                "job file that adapt writes"
            )
    metric = None if config.adapt is None else config.adapt.metric
    if config.choices is not None and metric in (*OF_TEXTS, "fidelity"):
        raise UserError(f"adapt.metric: {metric} is not a metric for labels; with choices, use exact_match")


def draw(total: int, count: int) -> list[int]:
    """Draw `count` distinct numbers below `total` in random order, or all of them if there are fewer."""
    return random.Random(SEED).sample(range(total), min(count, total))


def layout(config: JobConfig, listed: Files) -> tuple[list[InputFile], pa.Schema]:
    """Return the input files and the schema of the columns to read: the job's columns, and those that `adapt` names.

    Raises UserError if a file cannot be read, or a column is missing or has the wrong type.
    """
    assert config.adapt is not None
    named = {"references": config.adapt.references, "responses": config.adapt.responses}
    columns = {key: name for key, name in named.items() if name is not None}
    output = config.output.model_copy(update={"keep": list(dict.fromkeys(columns.values()))})
    files, schema = read_footers(config.model_copy(update={"output": output}), listed)
    for key, name in columns.items():
        kind = schema.field(name).type
        is_list = key == "references" and isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        if not is_text(kind.value_type if is_list else kind):
            lists = ", or a list of strings" if key == "references" else ""
            raise UserError(f"adapt.{key}: column {name!r} is {kind}; it must be string{lists}")
    return files, schema


def read_sample(
    config: JobConfig, files: Sequence[InputFile], schema: pa.Schema, drawn: Sequence[int]
) -> tuple[pa.Table, list[bool]]:
    """Read rows. Return a table of the readable rows, in the order of `drawn`, and whether each row is readable.

    drawn: numbers of the rows to read, counted across all files. Only row groups with such a row are read.
    """
    in_order, ends = sorted(drawn), accumulate((file.rows for file in files), initial=0)
    single_rows = [
        Shard(row, file.url, row - first, 1)
        for file, (first, end) in zip(files, pairwise(ends), strict=True)
        for row in in_order[bisect_left(in_order, first) : bisect_left(in_order, end)]
    ]
    rows = {  # copied by way of IPC, because a slice would keep its whole batch in memory
        shard.index: from_ipc(to_ipc(table)) for shard, table in read_shards(files, single_rows, schema, config.storage)
    }
    readable = [rows[row][ERROR][0].as_py() is None for row in drawn]
    good = [rows[row].drop_columns(ERROR) for row, is_good in zip(drawn, readable, strict=True) if is_good]
    return pa.concat_tables([schema.empty_table(), *good]).combine_chunks(), readable


def prompt_ids(table: pa.Table, spec: PromptSpec) -> list[list[int] | None]:
    """Return the token ids of each row's prompt; None for a row with an error."""
    return [ids or None for ids in prepare_table(table, spec)[PROMPT_IDS].to_pylist()]  # only errors give no ids


def usable_references(value: Any, labels: Collection[str] | None) -> list[str]:
    """Return the references in `value` that are not blank, and are in `labels` if `labels` is given."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if text and text.strip()]
    return texts if labels is None else [text for text in texts if normalized(text) in labels]
