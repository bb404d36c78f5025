"""Opens the Iceberg catalog, reads a table as input, and adds output files (parts) to a table without copying them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from pyiceberg.catalog import LOCATION, WAREHOUSE_LOCATION, Catalog, MetastoreCatalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile
from pyiceberg.io.fsspec import FsspecInputFile, FsspecOutputFile
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema, make_compatible_name
from pyiceberg.table import FileScanTask, Table, TableProperties
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_between_ids
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Properties
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.input.table import CommitConflict, PartFile, TablePin, check_columns, check_types, store_url
from pipeline.messages import listed
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import filesystem

STORAGE = "skipdecode.storage"  # catalog property that holds the job's section `storage`, without `catalog`, as JSON
FINGERPRINT = "skipdecode.fingerprint"  # key under which a snapshot's summary holds the job's fingerprint
HELD = (pa.time64("us"),)  # types that an Iceberg table can hold, but a Delta table cannot
WRITABLE = (1, 2)  # Iceberg format versions that pyiceberg can write
COMPACT = "compact the table (rewrite_data_files) and read the new snapshot"
KEEPS_ROWS = (Operation.APPEND, Operation.REPLACE)  # operations that delete no row; REPLACE is a compaction
log = logging.getLogger(__name__)


class StoreFileIO(FileIO):
    """Opens and deletes an Iceberg table's files in the job's store. pyiceberg makes it from catalog properties."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self.storage = StorageConfig.model_validate_json(properties[STORAGE])

    def new_input(self, location: str) -> InputFile:
        return FsspecInputFile(*self._found(location))

    def new_output(self, location: str) -> OutputFile:
        return FsspecOutputFile(*self._found(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        url, fs = self._found(location if isinstance(location, str) else location.location)
        fs.rm(url)

    def _found(self, location: str) -> tuple[str, Any]:
        url = store_url(location)
        fs, _ = filesystem(url, self.storage)
        return url, LocalFileSystem(auto_mkdir=True) if isinstance(fs, LocalFileSystem) else fs


def open_catalog(storage: StorageConfig, *, create: bool) -> Catalog:
    """Return the job's Iceberg catalog. create: whether to create the catalog's own tables in a new SQL database.

    Raises UserError if the settings in `storage.catalog` are wrong, and StoreFailed if the catalog does not answer.
    """
    properties = {
        **storage.catalog.properties(),
        PY_IO_IMPL: f"{StoreFileIO.__module__}.{StoreFileIO.__qualname__}",
        STORAGE: storage.model_dump_json(exclude={"catalog"}),
        "init_catalog_tables": str(create).lower(),
    }
    place = storage.catalog.warehouse
    is_folder = storage.catalog.type != "rest" and not str(storage.catalog.uri).startswith("http")
    if place is not None and "://" not in place and is_folder:  # absolute, because new tables store this path
        properties["warehouse"] = os.path.abspath(place)
    with _one_line(storage):
        return load_catalog(storage.catalog.name, **properties)


def find_table(catalog: Catalog, name: str, storage: StorageConfig) -> Table | None:
    """Return the current state of table `name`; None if it does not exist. Raises the errors of `open_catalog`."""
    if not all(name.split(".")) or "." not in name:
        raise UserError(f"{name}: the name of an Iceberg table must be namespace.table")
    with _one_line(storage):
        try:
            return catalog.load_table(name)
        except NoSuchTableError:
            return None


@contextmanager
def _one_line(storage: StorageConfig) -> Iterator[None]:
    name = f"storage.catalog {storage.catalog.name!r}"
    try:
        yield
    except SQLAlchemyError as error:
        reason = flat(getattr(error, "orig", None) or error)  # the original error, without the SQL and link in `error`
        raise UserError(f"{name}: {reason}; check storage.catalog.uri, or the catalog's settings") from None
    except (ValueError, NoSuchPropertyException, NotInstalledError) as error:
        raise UserError(f"{name}: {flat(error)}") from None
    except (RESTError, RequestException) as error:
        raise StoreFailed(f"{name}: {flat(error)}") from None


class IcebergInput:
    """Implements `InputTable` for Iceberg. Planning needs the catalog; reading data files does not."""

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

    def data_files(self, snapshot: int) -> dict[str, int]:
        self._snapshot(snapshot)
        try:
            return self._files(self.table.scan(snapshot_id=snapshot).plan_files())
        except UserError:
            raise
        except ValueError as error:  # raised for equality deletes, which pyiceberg cannot read
            raise UserError(f"{self.name}: snapshot {snapshot}: {flat(error)}; {COMPACT}") from None

    def appended(self, after: int, until: int) -> dict[str, int]:
        if after == until:
            return {}
        self._snapshot(until)
        try:
            between = list(ancestors_between_ids(after, until, self.table.metadata))
            tasks = self.table.incremental_append_scan(
                from_snapshot_id_exclusive=after, to_snapshot_id_inclusive=until
            ).plan_files()
        except ValueError as error:
            raise UserError(
                f"{self.name}: it is not known which rows were added since snapshot {after}, which the last successful "
                f"run answered: {flat(error)}; answer the whole table into another output.path"
            ) from None
        for one in between:
            operation = one.summary.operation if one.summary is not None else None
            if operation not in KEEPS_ROWS:
                kind = "of unknown kind" if operation is None else operation.value
                raise UserError(
                    f"{self.name}: snapshot {one.snapshot_id} ({kind}) changed or deleted rows since snapshot {after}, "
                    "which the last successful run answered; answer the whole table into another output.path"
                )
        return self._files(tasks)

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        shown, held = self._schema(snapshot), self._field_ids(url, schema)
        by_id = {number: name for name, number in held.items()}
        sources = (source for spec in self.table.specs().values() for source in spec.fields)
        partitions = {one.source_id for one in sources if isinstance(one.transform, IdentityTransform)}
        for name in names:
            if name not in shown.column_names:
                columns = listed(field.name for field in shown.fields)
                raise UserError(f"{self.name}: no column {name!r} at snapshot {snapshot}; it has {columns}")
            field = shown.find_field(name)
            for path in [path for path in held if path == name or path.startswith(f"{name}.")]:
                if path not in shown.column_names or shown.find_field(path).field_id != held[path]:
                    raise UserError(f"{url}: its column {path!r} is not the table's column of this name; {COMPACT}")
            if name in schema.names:
                if held and name not in held:
                    raise UserError(f"{url}: its column {name!r} has no Iceberg field id; {COMPACT}")
                continue
            if field.field_id in by_id:
                held_as = by_id[field.field_id]
                if held_as == make_compatible_name(name):
                    raise UserError(
                        f"{url}: Iceberg's files hold column {name!r} as {held_as!r}; rename it in the table to "
                        f"letters, digits and _, and {COMPACT}"
                    )
                raise UserError(f"{url}: has column {name!r} under its earlier name {held_as!r}; {COMPACT}")
            if field.field_id in partitions:
                raise UserError(f"{url}: lacks the partition column {name!r}; {COMPACT}, or leave the column out")
            if field.initial_default is not None:
                raise UserError(f"{url}: lacks column {name!r}, which has a default; {COMPACT}")
            schema = schema.append(pa.field(name, pa.null()))
        return schema

    def _field_ids(self, url: str, schema: pa.Schema) -> dict[str, int]:
        """Return the Iceberg field id of each column and nested field of data file `url`. The keys are dotted names.

        If the file has no ids, take them from the table's name mapping; without such a mapping, return {}.
        """
        mapping = self.table.name_mapping()
        try:
            held = pyarrow_to_schema(schema, mapping, downcast_ns_timestamp_to_us=True)
        except (ValueError, TypeError) as error:
            if mapping is None:
                return {}
            raise UserError(f"{url}: its columns do not match the table's columns: {flat(error)}; {COMPACT}") from None
        return {name: held.find_field(name).field_id for name in held.column_names}

    def _snapshot(self, number: int) -> Snapshot:
        found = self.table.snapshot_by_id(number)
        if found is None:
            raise UserError(f"input.snapshot: {self.name} has no snapshot {number} (expired?); set another snapshot")
        return found

    def _schema(self, snapshot: int) -> Schema:
        """Return a snapshot's schema. For the newest snapshot, return the table's schema, which may be newer."""
        found = self._snapshot(snapshot)
        if found.schema_id is None or found == self.table.current_snapshot():
            return self.table.schema()
        return self.table.schemas()[found.schema_id]

    def _files(self, tasks: Iterable[object]) -> dict[str, int]:
        files = {}
        for task in tasks:
            assert isinstance(task, FileScanTask)
            url = store_url(task.file.file_path)
            if task.delete_files:
                raise UserError(f"{url}: delete files of {self.name} delete rows of this data file; {COMPACT}")
            if task.file.file_format != FileFormat.PARQUET:
                kind = task.file.file_format.value
                raise UserError(f"{url}: this data file of {self.name} is {kind}; convert the table to Parquet")
            files[url] = task.file.file_size_in_bytes
        return dict(sorted(files.items()))


class IcebergOutput:
    """Implements `OutputTable` for Iceberg."""

    def __init__(self, name: str, storage: StorageConfig) -> None:
        self.name = name
        self.storage = storage
        self.catalog = open_catalog(storage, create=True)

    def check(self, schema: pa.Schema) -> None:
        check_types(self.name, schema, HELD)
        table = self._table()
        if table is not None:
            self._check_table(table, schema)
        elif isinstance(self.catalog, MetastoreCatalog) and not self._location_of_new():
            raise UserError(f"output.table: {self.name} does not exist: create it, or set storage.catalog.warehouse")

    def snapshot_of(self, fingerprint: str) -> int | None:
        table = self._table()
        return None if table is None else _snapshot_of(table, fingerprint)

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        table = self._table() or self._created(schema)
        self._check_table(table, schema)
        if _snapshot_of(table, fingerprint) is not None:
            raise CommitConflict(f"{self.name} already has this job's snapshot")
        # no retries: after a conflict, pyiceberg would commit again without looking for this job's snapshot
        table.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        urls = [part.url if "://" in part.url else f"file://{part.url}" for part in parts]
        try:
            table.add_files(urls, {FINGERPRINT: fingerprint})
        except CommitFailedException as error:
            raise CommitConflict(flat(error)) from None
        except ValueError as error:
            if "already referenced" not in str(error):
                raise
            log.warning("%s: an expired snapshot has already added this job's output files to the table", self.name)
        snapshot = table.current_snapshot()
        assert snapshot is not None
        return snapshot.snapshot_id

    def _table(self) -> Table | None:
        return find_table(self.catalog, self.name, self.storage)

    def _location_of_new(self) -> str | None:
        """Return the folder for new tables; None if neither catalog nor namespace sets one."""
        try:
            namespace = self.catalog.load_namespace_properties(self.name.rpartition(".")[0])
        except NoSuchNamespaceError:
            namespace = {}
        return self.catalog.properties.get(WAREHOUSE_LOCATION) or namespace.get(LOCATION)

    def _created(self, schema: pa.Schema) -> Table:
        namespace, _, _ = self.name.rpartition(".")
        try:
            try:
                self.catalog.create_namespace_if_not_exists(namespace)
            except Exception:  # a database error, if another run has just created the namespace in a SQL catalog
                if not self.catalog.namespace_exists(namespace):
                    raise
            return self.catalog.create_table(self.name, schema)
        except (NamespaceAlreadyExistsError, TableAlreadyExistsError) as error:
            raise CommitConflict(flat(error)) from None

    def _check_table(self, table: Table, schema: pa.Schema) -> None:
        if table.format_version not in WRITABLE:
            problem = f"has format version {table.format_version}, which pyiceberg cannot write"
            raise UserError(f"output.table: {self.name} {problem}; choose a table of version {WRITABLE[-1]}")
        partitions, fields = [field.name for field in table.spec().fields], table.schema().fields
        there = {field.name: str(field.field_type) for field in fields}
        ours = {field.name: _type_in(table, field) for field in schema}
        check_columns(self.name, partitions, [field.name for field in fields if field.required], there, ours)


def _snapshot_of(table: Table, fingerprint: str) -> int | None:
    for snapshot in reversed(table.snapshots()):
        if snapshot.summary is not None and snapshot.summary.get(FINGERPRINT) == fingerprint:
            return snapshot.snapshot_id
    return None


def _type_in(table: Table, field: pa.Field) -> str:
    """Return a column's Iceberg type with the table's field ids, or its Arrow type if the table has no id for it."""
    try:
        mapped = pyarrow_to_schema(pa.schema([field]), name_mapping=table.schema().name_mapping)
    except ValueError:
        return str(field.type)
    return str(mapped.fields[0].field_type)
