"""An Iceberg table as output: the parts become its data files where they lie (as by `add_files`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import pyarrow as pa
from pyiceberg.catalog import LOCATION, WAREHOUSE_LOCATION, MetastoreCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import parquet_file_to_data_file, pyarrow_to_schema
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table import Table, TableProperties

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.messages import listed
from pipeline.storage.concurrency import in_parallel
from pipeline.tables.catalog import find_table, open_catalog
from pipeline.tables.column_types import check_columns, check_types
from pipeline.tables.table import CommitConflict, PartFile

log = logging.getLogger(__name__)
FINGERPRINT = "skipdecode.fingerprint"  # in a snapshot's summary
HELD = (pa.time64("us"),)  # types besides those of every table
WRITABLE = (1, 2)  # format versions


class IcebergOutput:
    """See `OutputTable`."""

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
            raise UserError(f"output.table: {self.name} does not exist: give storage.catalog.warehouse, or create it")

    def snapshot_of(self, fingerprint: str) -> int | None:
        table = self._table()
        return None if table is None else _snapshot_of(table, fingerprint)

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        table = self._table() or self._created(schema)
        self._check_table(table, schema)
        if _snapshot_of(table, fingerprint) is not None:
            raise CommitConflict(f"{self.name} has this job's snapshot by now")
        # the library would repeat a commit that lost against another without looking for this job's snapshot
        table.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        urls = [_location(part.url) for part in parts]
        if _refers_to(table, urls):
            log.warning("%s: has the parts of this job already, from a snapshot that has expired", self.name)
        else:
            try:
                _add_files(table, urls, fingerprint)
            except CommitFailedException as error:
                raise CommitConflict(flat(error)) from None
        snapshot = table.current_snapshot()
        assert snapshot is not None
        return snapshot.snapshot_id

    def _table(self) -> Table | None:
        return find_table(self.catalog, self.name, self.storage)

    def _location_of_new(self) -> str | None:
        """Where a table would be created; None if nothing says it."""
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
            except Exception:  # a SQL catalog raises its database's error if another run makes it in this moment
                if not self.catalog.namespace_exists(namespace):
                    raise
            return self.catalog.create_table(self.name, schema)
        except (NamespaceAlreadyExistsError, TableAlreadyExistsError) as error:
            raise CommitConflict(flat(error)) from None

    def _check_table(self, table: Table, schema: pa.Schema) -> None:
        if table.format_version not in WRITABLE:
            raise UserError(
                f"output.table: {self.name} has format version {table.format_version}, which pyiceberg cannot write"
            )
        if table.spec().fields:
            names = listed(field.name for field in table.spec().fields)
            raise UserError(f"output.table: {self.name} is partitioned by {names}; parts are not: choose another table")
        required = next((field.name for field in table.schema().fields if field.required), None)
        if required is not None:
            raise UserError(f"output.table: {self.name} does not allow null in {required!r}, which an answer may be")
        there = {field.name: str(field.field_type) for field in table.schema().fields}
        check_columns(self.name, there, {field.name: _type_in(table, field) for field in schema})


def _add_files(table: Table, urls: Sequence[str], fingerprint: str) -> None:
    """`Table.add_files`, which reads one footer after the other, with the footers read in parallel."""
    read = partial(parquet_file_to_data_file, table.io, table.metadata)
    with table.transaction() as transaction:
        if table.name_mapping() is None:
            mapping = table.schema().name_mapping.model_dump_json()
            transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
        with transaction.update_snapshot(snapshot_properties={FINGERPRINT: fingerprint}).fast_append() as update:
            for data_file in in_parallel(read, urls):
                update.append_data_file(data_file)


def _refers_to(table: Table, urls: Sequence[str]) -> bool:
    """Whether a data file of the table is one of these."""
    snapshot, wanted = table.current_snapshot(), set(urls)

    def refers(manifest: ManifestFile) -> bool:
        return any(entry.data_file.file_path in wanted for entry in manifest.fetch_manifest_entry(table.io))

    manifests = [] if snapshot is None else snapshot.manifests(table.io)
    return any(in_parallel(refers, [one for one in manifests if one.content == ManifestContent.DATA]))


def _snapshot_of(table: Table, fingerprint: str) -> int | None:
    for snapshot in reversed(table.snapshots()):
        if snapshot.summary is not None and snapshot.summary.get(FINGERPRINT) == fingerprint:
            return snapshot.snapshot_id
    return None


def _type_in(table: Table, field: pa.Field) -> str:
    """The Iceberg type of a column under the table's field ids; the Arrow type if the table lacks some of it."""
    try:
        mapped = pyarrow_to_schema(pa.schema([field]), name_mapping=table.schema().name_mapping)
    except ValueError:
        return str(field.type)
    return str(mapped.fields[0].field_type)


def _location(url: str) -> str:
    return url if "://" in url else f"file://{url}"
