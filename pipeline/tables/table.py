"""What the pipeline asks of a table, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(frozen=True)
class DataFile:
    """A data file: absolute path or s3:// URL, and size in bytes."""

    url: str
    size: int


@dataclass(frozen=True)
class PartFile:
    """A part that becomes a data file: absolute path or s3:// URL, size in bytes, output rows."""

    url: str
    size: int
    rows: int


@dataclass(frozen=True)
class TablePin:
    """A snapshot of a table. table: the table's own id, which another table of the same name does not have."""

    table: str
    snapshot: int


class CommitConflict(Exception):
    """Another writer changed the table since it was read."""


class InputTable(Protocol):
    """A table as input. Refusals are UserErrors of one line that name the table.

    root: the folder that holds its data files, or most of them.
    """

    root: str

    def newest(self) -> TablePin | None:
        """The newest snapshot; None of a table that has none yet."""
        ...

    def data_files(self, snapshot: int) -> list[DataFile]:
        """The table's data files at a snapshot. Refuses files of which rows were deleted, and formats but Parquet."""
        ...

    def appended(self, after: int, until: int) -> list[DataFile]:
        """Data files with the rows appended after one snapshot and up to another.

        A compaction changes no rows and adds none: the files are those that the appends wrote. Refuses a snapshot in
        between that changed or deleted rows, and one that is no successor.
        """
        ...

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        """A data file's schema with the columns that the table shows at a snapshot.

        A column that the table got after the file was written is null there: it has the type null. Refuses a column
        that the table has not, and one that the file holds under another name or as a partition.

        Args:
            schema: the file's.
            names: columns that the job reads.
        """
        ...


class OutputTable(Protocol):
    """A table as output, which need not exist. Refusals are UserErrors of one line that name the table."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse a table that cannot hold files of this schema: other columns, partitions, types that it lacks."""
        ...

    def snapshot_of(self, fingerprint: str) -> int | None:
        """The snapshot that a job with this fingerprint has committed; None if there is none."""
        ...

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        """Add the parts as one snapshot that bears the fingerprint; creates the table if it does not exist.

        Returns the snapshot. Raises CommitConflict, with nothing added, if another writer was faster, perhaps one with
        the same fingerprint.
        """
        ...
