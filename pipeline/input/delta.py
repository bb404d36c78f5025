"""Reads a Delta table as input, and adds a job's output files (parts) to a Delta table without copying them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.input.table import (
    CommitConflict,
    PartFile,
    TablePin,
    check_columns,
    check_types,
    real_url,
    store_url,
)
from pipeline.messages import listed
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import open_folder

MAPPING = "delta.columnMapping.mode"
COMPACT = "rewrite the table (OPTIMIZE, or REORG TABLE ... APPLY (PURGE)) and read the new version"
FINGERPRINT = "skipdecode.fingerprint"  # key under which a commit's metadata holds the job's fingerprint
# table features that let deltalake add a job's files without changing them
WRITABLE = {
    *("appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed"),
    *("deletionVectors", "v2Checkpoint", "timestampNtz", "variantType"),
}
RULES = ("delta.constraints.", "delta.invariants")  # prefixes of table properties that restrict a row's values


def store_options(url: str, storage: StorageConfig) -> dict[str, str]:
    """Return deltalake's storage options for a table; credentials come from the environment."""
    if not url.startswith("s3://"):
        return {}
    options = {"aws_conditional_put": "etag"}
    if storage.endpoint_url:
        options["aws_endpoint_url"] = storage.endpoint_url
        options["aws_allow_http"] = str(storage.endpoint_url.startswith("http://")).lower()
    if storage.region:
        options["aws_region"] = storage.region
    return options


def read_commit(url: str, storage: StorageConfig, version: int) -> bytes:
    """Return the log file of a version, with one JSON action per line. Raises FileNotFoundError if it was deleted.

    deltalake's `history` is not used: it holds the GIL while it waits, so that the job could not renew its lease.
    """
    return open_folder(f"{url}/_delta_log", storage).read(f"{version:020}.json")


def _store_failed(url: str, error: OSError) -> StoreFailed:
    """Turn deltalake's error for an unreachable store into a StoreFailed. Make its message one line without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m|↳", "", str(error))
    return StoreFailed(f"{url}: {flat(text)}")


@contextmanager
def _one_line(url: str, version: int | None) -> Iterator[None]:
    """Turn deltalake's errors into UserError, or into StoreFailed if the store cannot be reached."""
    try:
        yield
    except DeltaError as error:
        at = "" if version is None else f" at version {version}"
        raise UserError(f"{url}: the Delta table cannot be read{at}: {flat(error)}") from None
    except OSError as error:
        raise _store_failed(url, error) from None


def find_table(url: str, storage: StorageConfig, version: int | None = None) -> DeltaTable | None:
    """Return the table at `url`, or None. version: None is the newest. Raises UserError if the table is unreadable."""
    with _one_line(url, version):
        try:
            table = DeltaTable(url, storage_options=store_options(url, storage))
        except TableNotFoundError:
            return None
        if version is not None:
            if version > table.version():  # deltalake would count up to it; an Iceberg snapshot id has 19 digits
                raise UserError(f"{url}: the Delta table has no version {version}; the newest is {table.version()}")
            table.load_as_version(version)
    mode = table.metadata().configuration.get(MAPPING, "none")
    if mode != "none":
        mapped = f"the table's columns have other names in its files ({MAPPING} = {mode})"
        raise UserError(f"{url}: not supported: {mapped}; use a table without column mapping")
    return table


class DeltaInput:
    """Implements `InputTable` for Delta. A snapshot is a table version. Only planning reads the transaction log."""

    def __init__(self, path: str, storage: StorageConfig) -> None:
        self.root = real_url(path)
        self.storage = storage
        self._table = self._opened(None)

    def newest(self) -> TablePin | None:
        return TablePin(str(self._table.metadata().id), self._table.version())

    def data_files(self, snapshot: int) -> dict[str, int]:
        table = self._at(snapshot)
        with _one_line(self.root, snapshot):  # these calls refuse some tables that `find_table` accepts
            for batch in table.deletion_vectors():
                for url in pa.record_batch(batch)["filepath"].to_pylist():
                    raise self._deleted(store_url(url))
            actions = pa.table(table.get_add_actions())
        return self._files(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))

    def appended(self, after: int, until: int) -> dict[str, int]:
        answered = f"since version {after}, which the last successful run answered"
        if until < after:
            problem = f"the last successful run answered version {after}, but the table now ends at version {until}"
            raise UserError(f"{self.root}: {problem}; answer the whole table into another output.path")
        added: list[tuple[str, int]] = []
        for version in range(after + 1, until + 1):
            try:
                text = read_commit(self.root, self.storage, version)
            except FileNotFoundError:
                raise UserError(
                    f"{self.root}: the log of version {version} was deleted, so it is not known which rows were added "
                    f"{answered}; answer the whole table into another output.path"
                ) from None
            actions = [json.loads(line) for line in text.splitlines() if line.strip()]
            operation = next((one["commitInfo"].get("operation") for one in actions if "commitInfo" in one), "unknown")
            for action in actions:
                add, remove = action.get("add"), action.get("remove")
                if remove is not None and remove["dataChange"]:
                    raise UserError(
                        f"{self.root}: version {version} ({operation}) changed or deleted rows {answered}; answer the "
                        "whole table into another output.path"
                    )
                if add is not None and add["dataChange"]:
                    if add.get("deletionVector") is not None:
                        raise self._deleted(add["path"])
                    added.append((add["path"], add["size"]))
        return self._files(added)

    def as_shown(self, snapshot: int, url: str, schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
        table = self._at(snapshot)
        shown = [field.name for field in table.schema().fields]
        for name in names:
            if name not in shown:
                raise UserError(f"{self.root}: no column {name!r} at version {snapshot}; it has {listed(shown)}")
            if name in table.metadata().partition_columns:
                raise UserError(
                    f"{self.root}: {name!r} is a partition column, which the data files do not hold; leave it out"
                )
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.null()))
        return schema

    def _at(self, version: int) -> DeltaTable:
        """Return the table at a version. It is opened once, and not for each of its files."""
        if self._table.version() != version:
            self._table = self._opened(version)
        return self._table

    def _opened(self, version: int | None) -> DeltaTable:
        table = find_table(self.root, self.storage, version)
        if table is None:
            raise UserError(f"input.path: {self.root} holds no Delta table")
        return table

    def _files(self, entries: Iterable[tuple[str, int]]) -> dict[str, int]:
        located = []
        for path, size in ((unquote(path), size) for path, size in entries):
            is_absolute = "://" in path or path.startswith(("/", "file:"))
            located.append((store_url(path) if is_absolute else f"{self.root}/{path}", size))
        return dict(sorted(located))

    def _deleted(self, path: str) -> UserError:
        return UserError(f"{path}: a deletion vector of {self.root} deletes rows of this data file; {COMPACT}")


class DeltaOutput:
    """Implements `OutputTable` for Delta. A job's commit is found by transaction id, even after its log was deleted."""

    def __init__(self, path: str, storage: StorageConfig) -> None:
        self.url = real_url(path)
        self.storage = storage

    def check(self, schema: pa.Schema) -> None:
        check_types(self.url, schema, ())
        table = find_table(self.url, self.storage)
        if table is not None:
            self._check_table(table, schema)

    def snapshot_of(self, fingerprint: str) -> int | None:
        table = find_table(self.url, self.storage)
        base = None if table is None else table.transaction_version(f"skipdecode-{fingerprint}")
        if table is None or base is None:
            return None
        for version in range(base + 1, table.version() + 1):  # other writers may have committed after `base`
            with suppress(FileNotFoundError):  # old log files may have been deleted
                if fingerprint.encode() in read_commit(self.url, self.storage, version):
                    return version
        return base + 1  # the log of the job's commit was deleted; this is its earliest possible version

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        table = find_table(self.url, self.storage) or self._created(schema)
        self._check_table(table, schema)
        # check for an earlier commit of this job, because deltalake finds conflicts only in commits newer than `table`
        if table.transaction_version(f"skipdecode-{fingerprint}") is not None:
            raise CommitConflict(f"{self.url} already has this job's commit")
        application = Transaction(f"skipdecode-{fingerprint}", table.version())
        properties = CommitProperties(custom_metadata={FINGERPRINT: fingerprint}, app_transactions=[application])
        try:
            table.create_write_transaction(
                [self._added(part) for part in parts], "append", Schema.from_arrow(schema), commit_properties=properties
            )
        except CommitFailedError as error:
            raise CommitConflict(flat(error)) from None
        except OSError as error:
            raise _store_failed(self.url, error) from None
        snapshot = self.snapshot_of(fingerprint)
        assert snapshot is not None
        return snapshot

    def _created(self, schema: pa.Schema) -> DeltaTable:
        try:
            return DeltaTable.create(
                self.url, Schema.from_arrow(schema), mode="error", storage_options=store_options(self.url, self.storage)
            )
        except DeltaError as error:
            if find_table(self.url, self.storage) is None:
                raise
            raise CommitConflict(flat(error)) from None
        except OSError as error:
            raise _store_failed(self.url, error) from None

    def _check_table(self, table: DeltaTable, schema: pa.Schema) -> None:
        metadata, fields = table.metadata(), table.schema().fields
        rule = next((key for key in metadata.configuration if key.startswith(RULES)), None)
        if rule is not None:
            raise UserError(
                f"output.table: {self.url} has the rule {rule}, which the job cannot enforce; choose another table"
            )
        features = sorted({*(table.protocol().writer_features or ())} - WRITABLE)
        if features:
            raise UserError(
                f"output.table: {self.url} uses {features[0]}, which a job's files do not support; choose another table"
            )
        there, ours = (
            {field.name: field.type.to_json().strip('"') for field in some}
            for some in (fields, Schema.from_arrow(schema).fields)
        )
        required = [field.name for field in fields if not field.nullable]
        check_columns(self.url, metadata.partition_columns, required, there, ours)

    def _added(self, part: PartFile) -> AddAction:
        prefix = f"{self.url}/"
        assert part.url.startswith(prefix), "planning refuses output folders outside the table"
        return AddAction(
            path=part.url.removeprefix(prefix),
            size=part.size,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": part.rows}),
        )
