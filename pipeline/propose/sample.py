"""The first rows of an input, as Python values by column; no more of it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.config.input import InputFormat
from pipeline.config.job import StorageConfig
from pipeline.messages import one_line
from pipeline.read.files import file_format, list_files
from pipeline.read.rows import path_values
from pipeline.read.text_files import parsed
from pipeline.read.text_lines import GZIP_ERRORS, csv_header, csv_rows, json_lines, open_text, records
from pipeline.storage.folder import filesystem

ROWS = 200
FORMATS: tuple[InputFormat | None, ...] = (None, "jsonl", "csv")


@dataclass(frozen=True)
class Sample:
    """The first rows of the first file.

    files: number of input files. format: `input.format`, where the names of the files do not say it. columns: values of
    each, None where a row has none.
    """

    files: int
    format: InputFormat | None
    columns: dict[str, list[Any]]


def read_sample(path: str, storage: StorageConfig) -> Sample:
    """Rows of a file, a folder or a glob. Raises UserError if there are none, or the first file cannot be read."""
    given, urls = _listed(path, storage)
    kind = file_format(urls[0], given)
    try:
        of_path = path_values(urls[0])
        rows = [of_path | row for row in itertools.islice(_READERS[kind](urls[0], storage), ROWS)]
    except (pa.ArrowException, ValueError, *GZIP_ERRORS) as error:
        raise UserError(f"{urls[0]}: cannot be read as {kind}: {one_line(error)}") from None
    if not rows:
        raise UserError(f"{urls[0]}: no row that can be read as {kind}")
    names = dict.fromkeys(name for row in rows for name in row)
    return Sample(len(urls), given, {name: [row.get(name) for row in rows] for name in names})


def _listed(path: str, storage: StorageConfig) -> tuple[InputFormat | None, list[str]]:
    """The format that a folder's files need to be named, and the files. UserError as for Parquet if there are none."""
    first: UserError | None = None
    for given in FORMATS:
        try:
            return given, list(list_files([path], storage, given))
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def _parquet(url: str, storage: StorageConfig) -> Iterator[dict[str, Any]]:
    fs, inside = filesystem(url, storage)
    with fs.open(inside, "rb") as opened:
        for batch in pq.ParquetFile(opened).iter_batches(ROWS, use_threads=False):
            yield from batch.to_pylist()


def _json(url: str, storage: StorageConfig) -> Iterator[dict[str, Any]]:
    """The lines that are objects; others are errors of their rows when the job runs."""
    with open_text(url, storage) as stream:
        for block, *_ in records(stream, "jsonl"):
            yield from (values for values, _ in map(parsed, json_lines(block)) if values is not None)


def _csv(url: str, storage: StorageConfig) -> Iterator[dict[str, Any]]:
    with open_text(url, storage) as stream:
        names = csv_header(stream)
        stream.seek(0)
        rows = itertools.chain.from_iterable(csv_rows(block) for block, *_ in records(stream, "csv"))
        yield from (dict(zip(names, fields, strict=False)) for fields, _ in itertools.islice(rows, 1, None))


_READERS = {"parquet": _parquet, "jsonl": _json, "csv": _csv}
