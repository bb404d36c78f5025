"""An Iceberg table as input: its Parquet data files, read as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_between_ids
from pyiceberg.transforms import IdentityTransform

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.messages import listed
from pipeline.tables.catalog import find_table, open_catalog
from pipeline.tables.iceberg_fields import file_field_ids
from pipeline.tables.table import DataFile, TablePin
from pipeline.tables.urls import store_url

COMPACT = "compact the table (rewrite_data_files) and read the new snapshot"
KEEPS_ROWS = (Operation.APPEND, Operation.REPLACE)  # replace: a compaction


class IcebergInput:
    """See `InputTable`. Its catalog answers while the job is planned; the data files are read without it."""

    def __init__(self, name: str, storage: StorageConfig) -> None:
        self.name = name
        table = find_table(open_catalog(storage, create=False), name, storage)
        if table is None:
            raise UserError(f"input.path: no table {name} in catalog {storage.catalog.name!r}; check storage.catalog")
        self.table: Table = table
        self.root = store_url(table.location()).rstrip("/")

    def newest(self) -> TablePin | None:
        snapshot = self.table.current_snapshot()
        return None if snapshot is None else TablePin(str(self.table.metadata.table_uuid), snapshot.snapshot_id)

    def data_files(self, snapshot: int) -> list[DataFile]:
        self._snapshot(snapshot)
        try:
            return self._files(self.table.scan(snapshot_id=snapshot).plan_files())
        except UserError:
            raise
        except ValueError as error:  # equality deletes
            raise UserError(f"{self.name}: snapshot {snapshot}: {flat(error)}; {COMPACT}") from None

    def appended(self, after: int, until: int) -> list[DataFile]:
        if after == until:
            return []
        self._snapshot(until)
        try:
            between = list(ancestors_between_ids(after, until, self.table.metadata))
            tasks = self.table.incremental_append_scan(
                from_snapshot_id_exclusive=after, to_snapshot_id_inclusive=until
            ).plan_files()
        except ValueError as error:
            raise UserError(
                f"{self.name}: what was added since snapshot {after}, which the last success has answered, is not "
                f"known: {flat(error)}; answer the whole table into another output.path"
            ) from None
        for one in between:
            operation = one.summary.operation if one.summary is not None else None
            if operation not in KEEPS_ROWS:
                kind = "of unknown kind" if operation is None else operation.value
                raise UserError(
                    f"{self.name}: snapshot {one.snapshot_id} ({kind}) changed or deleted rows since snapshot {after}, "
                    "which the last success has answered; answer the whole table into another output.path"
                )
        return self._files(tasks)

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        shown, held = self._schema(snapshot), file_field_ids(schema, self.table.name_mapping())
        by_id = {number: name for name, number in held.items()}
        for name in names:
            if name not in shown.column_names:
                columns = listed(field.name for field in shown.fields)
                raise UserError(f"{self.name}: no column {name!r} at snapshot {snapshot}; it has {columns}")
            field = shown.find_field(name)
            for path in [path for path in held if path == name or path.startswith(f"{name}.")]:
                if path not in shown.column_names or shown.find_field(path).field_id != held[path]:
                    raise UserError(f"{url}: its column {path!r} is another one than the table's: {COMPACT}")
            if name in schema.names:
                if held and name not in held:
                    raise UserError(f"{url}: its column {name!r} has no field id of the table's: {COMPACT}")
                continue
            if field.field_id in by_id:
                raise UserError(
                    f"{url}: holds column {name!r} as {by_id[field.field_id]!r}, its earlier name; {COMPACT}"
                )
            if self._is_partition(field.field_id):
                raise UserError(f"{url}: lacks the partition column {name!r}; {COMPACT}, or leave the column out")
            if field.initial_default is not None:
                raise UserError(f"{url}: lacks column {name!r}, which has a default; {COMPACT}")
            schema = schema.append(pa.field(name, pa.null()))
        return schema

    def _snapshot(self, number: int) -> Snapshot:
        found = self.table.snapshot_by_id(number)
        if found is None:
            raise UserError(f"input.snapshot: {self.name} has no snapshot {number}; it may have expired")
        return found

    def _schema(self, snapshot: int) -> Schema:
        """The columns at a snapshot; of the newest those of the table, which may have changed since."""
        found = self._snapshot(snapshot)
        if found.schema_id is None or found == self.table.current_snapshot():
            return self.table.schema()
        return self.table.schemas()[found.schema_id]

    def _is_partition(self, number: int) -> bool:
        fields = [field for spec in self.table.specs().values() for field in spec.fields]
        return any(field.source_id == number and isinstance(field.transform, IdentityTransform) for field in fields)

    def _files(self, tasks: Iterable[object]) -> list[DataFile]:
        files = []
        for task in tasks:
            assert isinstance(task, FileScanTask)
            url = store_url(task.file.file_path)
            if task.delete_files:
                raise UserError(f"{url}: rows of this data file of {self.name} were deleted by delete files; {COMPACT}")
            if task.file.file_format != FileFormat.PARQUET:
                raise UserError(f"{url}: a data file of {self.name} is {task.file.file_format.value}, not Parquet")
            files.append(DataFile(url, task.file.file_size_in_bytes))
        return sorted(files, key=lambda file: file.url)
