"""Finds a column of an input that seems to hold true answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from actors.engine.errors import UserError
from pipeline.config.forms import normalized
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import common_schema, path_values, read_all_columns, read_shards
from pipeline.input.schema import ERROR
from pipeline.input.shards import cut_shards

ROWS, SAMPLE_BYTES = 200, 2**26  # maximum rows and bytes to read
ANSWERS = (  # usual names of columns with true answers
    *("label", "labels", "answer", "answers", "reference", "references", "target", "gold", "expected", "summary"),
    *("highlights", "completion", "response", "output", "category", "class", "intent", "sentiment", "emotion"),
)


def first_rows(file: InputFile, storage: StorageConfig) -> dict[str, list[Any]]:
    """Return column name -> values in a file's first rows. Raises UserError if none of these rows can be read."""
    found, schema = read_all_columns(file.url, file.size, file.version, storage, file.format, ROWS)
    schema = common_schema([(found, schema)], list(dict.fromkeys([*path_values(file.url), *schema.names])), storage)
    shards = cut_shards([found], ROWS, SAMPLE_BYTES)[:1]
    tables = [table.filter(pc.field(ERROR).is_null()) for _, table in read_shards([found], shards, schema, storage)]
    if not tables or not tables[0].num_rows:
        raise UserError(f"{file.url}: none of the first {ROWS} rows can be read; correct the file")
    values: dict[str, list[Any]] = tables[0].select(schema.names).to_pydict()
    return values


def true_answers(columns: Mapping[str, Sequence[Any]], choices: Collection[str] | None = None) -> str | None:
    """Return the name of a column that seems to hold true answers; None if there is none.

    choices: labels, one of which each value must be. None: the column must hold texts and have a usual name.
    """
    labels = None if choices is None else set(map(normalized, choices))

    def fits(value: Any) -> bool:
        texts = value if isinstance(value, list) else [value]
        is_text = bool(texts) and all(isinstance(text, str) for text in texts)
        return is_text and (labels is None or all(normalized(text) in labels for text in texts))

    given = {name: [value for value in values if value is not None] for name, values in columns.items()}
    fitting = [name for name, values in given.items() if values and all(map(fits, values))]
    usual = [name for one in ANSWERS for name in fitting if name.lower() == one]
    return next(iter([*usual, *(fitting if labels is not None else [])]), None)
