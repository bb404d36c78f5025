"""Defines interfaces to Iceberg and Delta tables. Imports pyiceberg or deltalake only if a job names a table."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError
from pipeline.config.input import InputConfig
from pipeline.config.job import OutputConfig, StorageConfig
from pipeline.messages import listed, printable


@dataclass(frozen=True)
class PartFile:
    """A shard's output file, to be added to a table. url: absolute path or s3:// URL. size: bytes. rows: row count."""

    url: str
    size: int
    rows: int


@dataclass(frozen=True)
class TablePin:
    """A snapshot of a table. table: the table's id; a new table with the same name has another id."""

    table: str
    snapshot: int


class CommitConflict(Exception):
    """Another writer changed the table since it was read."""


class InputTable(Protocol):
    """Interface to an input table. Methods raise one-line UserErrors that name the table.

    root: the folder that holds the table's data files, or most of them.
    """

    root: str

    def newest(self) -> TablePin | None:
        """Return the newest snapshot; None if the table has none yet."""

    def data_files(self, snapshot: int) -> dict[str, int]:
        """Return URL -> size in bytes of each data file in a snapshot.

        Raises UserError if rows of a data file were deleted, or if a data file is not Parquet.
        """

    def appended(self, after: int, until: int) -> dict[str, int]:
        """Return URL -> bytes of each data file appended after snapshot `after`, up to and including snapshot `until`.

        Skip files that a compaction wrote. Raises UserError if `until` does not follow `after`, or if rows were changed
        or deleted.
        """

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        """Return `schema`, that of data file `url`, with a null column for each of `names` that the file lacks.

        A file lacks columns that were added to the table later. Raises UserError if one of `names` is not
        in the table or has another name in the file, or if a partition column is not in the file.
        """


class OutputTable(Protocol):
    """Interface to an output table, which may not exist yet. Methods raise one-line UserErrors that name the table."""

    def check(self, schema: pa.Schema) -> None:
        """Raise UserError if files with this schema do not fit the table's columns, types or partitions."""

    def snapshot_of(self, fingerprint: str) -> int | None:
        """Return the snapshot committed by the job with this fingerprint; None if there is none."""

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        """Add `parts` in one snapshot with the fingerprint in its metadata; return its id. Create the table if missing.

        Raises CommitConflict and adds nothing if another writer, perhaps another run of this job, committed first.
        """


def input_table(section: InputConfig, storage: StorageConfig) -> InputTable:
    """Return the table that the `input` section names. Raises UserError if the table is missing or unreadable."""
    assert section.is_table
    if section.format == "iceberg":
        from pipeline.input.iceberg import IcebergInput

        return IcebergInput(section.path[0], storage)
    from pipeline.input.delta import DeltaInput

    return DeltaInput(section.path[0], storage)


def output_table(section: OutputConfig, storage: StorageConfig) -> OutputTable:
    """Return the table that the `output` section names. Raises UserError if its catalog cannot be opened."""
    assert section.is_table
    if section.format == "iceberg":
        from pipeline.input.iceberg import IcebergOutput

        return IcebergOutput(str(section.table), storage)
    from pipeline.input.delta import DeltaOutput

    return DeltaOutput(table_name(section), storage)


def table_name(section: OutputConfig) -> str:
    """Return the output table's name. The name of a Delta table is its folder."""
    return section.table or section.path


def store_url(location: str) -> str:
    """Turn a location from a table's metadata (file:, s3a://, s3n://) into a local path or an s3:// URL."""
    if re.match(r"s3[an]://", location):
        return f"s3{location[3:]}"
    return re.sub(r"^file:(//)?(?=/)", "", location)


def real_url(location: str) -> str:
    """Return a folder's URL without a trailing slash. A local path becomes absolute, with symlinks resolved."""
    url = store_url(location).rstrip("/")
    return url if "://" in url else os.path.realpath(url)


_HELD = {  # types that Iceberg and Delta tables hold exactly as Parquet stores them
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
}


def check_types(table: str, schema: pa.Schema, more: Collection[pa.DataType]) -> None:
    """Raise UserError for the first column whose type the table cannot hold. more: allowed types besides `_HELD`."""
    for field in schema:
        wrong = _unheld(field.type, more)
        if wrong is not None:
            raise UserError(
                f"output.table: {table} cannot hold column {field.name!r} of type {printable(wrong)}; leave it out of "
                "output.keep, or convert the input's column"
            )


def _unheld(kind: pa.DataType, more: Collection[pa.DataType]) -> pa.DataType | None:
    """Return the first type inside `kind` that a table cannot hold, or None. more: allowed types besides `_HELD`."""
    if types.is_struct(kind):
        children = [child.type for child in kind]
    elif types.is_list(kind) or types.is_large_list(kind):
        children = [kind.value_type]
    elif types.is_map(kind):
        children = [kind.key_type, kind.item_type]
    else:
        return None if kind in _HELD or kind in more or types.is_decimal128(kind) else kind
    return next((wrong for child in children if (wrong := _unheld(child, more)) is not None), None)


def check_columns(
    table: str, partitions: Sequence[str], required: Sequence[str], there: Mapping[str, str], ours: Mapping[str, str]
) -> None:
    """Raise UserError if the table has partitions, or for the first column that does not match the job's answers.

    required: table columns that do not allow null. there, ours: column name -> type, of the table and of the answers.
    """
    if partitions:
        raise UserError(
            f"output.table: {table} is partitioned by {listed(partitions)}; choose a table without partitions"
        )
    if required:
        problem = f"does not allow null in {required[0]!r}, but a job may write null"
        raise UserError(f"output.table: {table} {problem}; make the column optional, or choose another table")
    for name in [*ours, *there]:
        if name not in there:
            problem = f"has no column {name!r}, which the job writes ({ours[name]})"
        elif name not in ours:
            problem = f"has a column {name!r}, which the job does not write"
        elif there[name] != ours[name]:
            problem = f"has column {name!r} of type {there[name]}, but the job writes {ours[name]}"
        else:
            continue
        raise UserError(f"output.table: {table} {problem}; choose another table, or change output.keep")
