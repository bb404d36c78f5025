"""Iceberg and Delta tables as input and output. Their libraries are imported only when a job names a table."""

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
from pipeline.messages import printable


@dataclass(frozen=True)
class PartFile:
    """A shard's output file, to add to a table. url: absolute path or s3:// URL. size: bytes. rows: output rows."""

    url: str
    size: int
    rows: int


@dataclass(frozen=True)
class TablePin:
    """A snapshot of a table. table: the table's id; another table of the same name has another id."""

    table: str
    snapshot: int


class CommitConflict(Exception):
    """Another writer changed the table since it was read."""


class InputTable(Protocol):
    """A table as input. A method that refuses raises a UserError of one line that names the table.

    root: the folder that holds its data files, or most of them.
    """

    root: str

    def newest(self) -> TablePin | None:
        """Return the newest snapshot; None if the table has none yet."""

    def data_files(self, snapshot: int) -> dict[str, int]:
        """Return URL -> bytes of each data file in a snapshot.

        Refuses tables with deleted rows or files other than Parquet.
        """

    def appended(self, after: int, until: int) -> dict[str, int]:
        """Return URL -> bytes of each data file that was appended after snapshot `after`, up to and including `until`.

        Skips compactions. Refuses if a snapshot between them changed or deleted rows, or `until` is no successor.
        """

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        """Return `schema`, of data file `url`, with a column for each of the table's columns `names` at a snapshot.

        A column added to the table after the file was written has the type null. Refuses a column that the table
        lacks, that the file holds under another name, or that is a partition column which the file lacks.
        """


class OutputTable(Protocol):
    """A table as output, which need not exist. A method that refuses raises a one-line UserError naming the table."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse a table that cannot hold files of this schema: other columns or partitions, or an unknown type."""

    def snapshot_of(self, fingerprint: str) -> int | None:
        """Return the snapshot committed by the job with this fingerprint; None if there is none."""

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        """Add the parts as one snapshot with the fingerprint in its metadata, and return it. Creates a missing table.

        Raises CommitConflict and adds nothing if another writer, perhaps another run of this job, was faster.
        """


def input_table(section: InputConfig, storage: StorageConfig) -> InputTable:
    """Return the table that the `input` section names. Raises UserError if it does not exist or cannot be read."""
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
    """Return the output table's name; for a Delta table its folder."""
    return section.table or section.path


def store_url(location: str) -> str:
    """Return a location in a table's metadata as a path or an s3:// URL; s3a and s3n become s3."""
    if re.match(r"s3[an]://", location):
        return f"s3{location[3:]}"
    return re.sub(r"^file:(//)?(?=/)", "", location)


def real_url(location: str) -> str:
    """Return a job's folder without a trailing slash; a local folder is absolute, with symlinks resolved."""
    url = store_url(location).rstrip("/")
    return url if "://" in url else os.path.realpath(url)


_HELD = {  # types that both table formats hold as Parquet stores them
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
}


def check_types(table: str, schema: pa.Schema, more: Collection[pa.DataType]) -> None:
    """Raise UserError that names a column whose type the table cannot hold unchanged. more: types besides `_HELD`."""
    for field in schema:
        wrong = _unheld(field.type, more)
        if wrong is not None:
            raise UserError(
                f"output.table: {table} cannot hold column {field.name!r} of type {printable(wrong)}; leave it out of "
                "output.keep, or convert the input's column"
            )


def _unheld(kind: pa.DataType, more: Collection[pa.DataType]) -> pa.DataType | None:
    """Return the first type in `kind` that a table cannot hold."""
    if types.is_struct(kind):
        children = [child.type for child in kind]
    elif types.is_list(kind) or types.is_large_list(kind):
        children = [kind.value_type]
    elif types.is_map(kind):
        children = [kind.key_type, kind.item_type]
    else:
        return None if kind in _HELD or kind in more or types.is_decimal128(kind) else kind
    return next((wrong for child in children if (wrong := _unheld(child, more)) is not None), None)


def check_columns(table: str, there: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise UserError that names the first column in which a table and the job's answers differ."""
    for name in [*ours, *there]:
        if name not in there:
            problem = f"has no column {name!r}, which the job writes ({ours[name]})"
        elif name not in ours:
            problem = f"has a column {name!r}, which the job does not write"
        elif there[name] != ours[name]:
            problem = f"has column {name!r} as {there[name]}, the job writes {ours[name]}"
        else:
            continue
        raise UserError(f"output.table: {table} {problem}; choose another table, or change output.keep")
