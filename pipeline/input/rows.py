"""Reads rows from input files of any format, and casts them to the job's schema.

A folder `name=value` in a file's path (Hive partition) adds a text column `name` with `value` in every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from urllib.parse import unquote

import pyarrow as pa

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile, check_unchanged, read_footer
from pipeline.input.schema import ERROR, conform, one_schema
from pipeline.input.shards import Shard, cut_shards, read_groups
from pipeline.input.text_files import TextColumns, read_text, scan_text
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import STORE_ERRORS

OF_PATH = {b"skipdecode.path": b"1"}  # metadata of a column that some files take from a folder name
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
COLUMN_ROWS, COLUMN_BYTES = 2**14, 2**26  # maximum rows and bytes per read, when whole columns are read


def read_layout(
    url: str,
    size: int,
    version: str,
    storage: StorageConfig,
    kind: str,
    columns: TextColumns | None = None,
    limit: int | None = None,
) -> tuple[InputFile, pa.Schema]:
    """Return a file with its row groups, and its schema. Raises UserError if it is missing or not of format `kind`."""
    try:
        if kind == "parquet":
            return read_footer(url, size, version, storage, columns.names if columns is not None else ())
        return scan_text(url, size, version, storage, kind, columns or TextColumns(()), limit)
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except PermissionError as error:
        raise UserError(f"{url}: cannot be read: {flat(error)}") from None


def read_all_columns(
    url: str, size: int, version: str, storage: StorageConfig, kind: str, limit: int
) -> tuple[InputFile, pa.Schema]:
    """Return a file's layout with all columns of its first `limit` rows. For arguments and errors see `read_layout`."""
    # a name that no column has; the first pass finds the names of a text file's columns, the second one their types
    _, schema = read_layout(url, size, version, storage, kind, TextColumns([""]), limit)
    return read_layout(url, size, version, storage, kind, TextColumns(schema.names), limit)


def read_shards(
    files: Sequence[InputFile], shards: Iterable[Shard], schema: pa.Schema, storage: StorageConfig
) -> Iterator[tuple[Shard, pa.Table]]:
    """Yield each shard with a table of its rows: the columns of `schema`, and the column `ERROR` with row errors.

    Consecutive shards of one file are read in one pass. files: must include the file of every shard.
    Raises UserError if a file has changed, and the errors of `read_groups` and `read_text`.
    """
    by_url = {file.url: file for file in files}
    for url, neighbours in groupby(shards, key=lambda shard: shard.url):
        file, of_file = by_url[url], list(neighbours)
        try:
            for shard, table in zip(of_file, read_rows(of_file, file, schema, storage), strict=True):
                check_unchanged(file, storage)
                yield shard, table
        except (*STORE_ERRORS, UserError, pa.ArrowException, AssertionError, RuntimeError):
            check_unchanged(file, storage)  # raises a clearer error if the file has changed
            raise


def read_rows(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """Yield one table per shard, in order, with the columns of `schema` and `ERROR`. All shards must be of `file`."""
    values = path_values(file.url)
    of_path = [field for field in schema if field.name in values and OF_PATH.items() <= (field.metadata or {}).items()]
    own = pa.schema([field for field in schema if field not in of_path])
    if file.format != "parquet":
        tables = read_text(shards, file, own, storage)
    else:
        tables = (conform(table, own) for table in read_groups(shards, own.names, storage))
    for table in tables:
        for field in of_path:
            value = pa.scalar(values[field.name], pa.string()).cast(field.type)
            table = table.add_column(schema.get_field_index(field.name), field, pa.repeat(value, table.num_rows))
        yield table


def path_values(url: str) -> dict[str, str | None]:
    """Return the name and value of each folder `name=value` in the path `url`. Hive's name for null becomes None."""
    pairs = [folder.split("=", 1) for folder in url.split("/")[:-1] if "=" in folder[1:]]
    return {unquote(name): None if value == HIVE_NULL else unquote(value) for name, value in pairs}


def decode(file: InputFile, names: Sequence[str], storage: StorageConfig) -> None:
    """Read the columns `names` of a file to its end. Raises UserError if its data is damaged."""
    of_file = [name for name in names if name not in path_values(file.url)]
    for _ in read_groups(cut_shards([file], COLUMN_ROWS, COLUMN_BYTES), of_file, storage):
        pass


def common_schema(
    footers: Sequence[tuple[InputFile, pa.Schema]], names: Sequence[str], storage: StorageConfig
) -> pa.Schema:
    """Return the common schema of input files. A column may be only in a file's path.

    Raises the errors of `one_schema`, and UserError if a column's value differs from the value in the file's path.
    """
    schemas, of_paths = {}, {name for file, _ in footers for name in path_values(file.url)}.intersection(names)
    for file, schema in footers:
        for name in of_paths.intersection(path_values(file.url)).difference(schema.names):
            schema = schema.append(pa.field(name, pa.string()))
        schemas[file.url] = schema
    common = one_schema(names, schemas)
    both = [  # columns that are in a file and also in its path
        (file, common.field(name))
        for file, own in footers
        for name in of_paths.intersection(own.names).intersection(path_values(file.url))
    ]
    for _ in in_parallel(lambda pair: _check_path_value(*pair, storage), both):
        pass
    return pa.schema([field.with_metadata(OF_PATH) if field.name in of_paths else field for field in common])


def _check_path_value(file: InputFile, field: pa.Field, storage: StorageConfig) -> None:
    """Raise UserError if a column's value differs from the value in the file's path."""
    values = path_values(file.url)
    try:
        value = pa.scalar(values[field.name], pa.string()).cast(field.type).as_py()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        value = values[field.name]
    shards = cut_shards([file], COLUMN_ROWS, COLUMN_BYTES)
    for shard, table in read_shards([file], shards, pa.schema([field]), storage):
        pairs = zip(table[field.name].to_pylist(), table[ERROR].to_pylist(), strict=True)
        for row, (found, error) in enumerate(pairs, shard.first_row):
            if found != value and error is None:
                raise UserError(
                    f"{file.url}: column {field.name!r} is {found!r} in row {row}, but {values[field.name]!r} in the "
                    "file's path; make the values equal, or rename the column or the folder"
                )


def to_ipc(table: pa.Table) -> bytes:
    """Return a table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_ipc(data: bytes) -> pa.Table:
    """Return the table that `to_ipc` wrote."""
    return pa.ipc.open_stream(data).read_all()
