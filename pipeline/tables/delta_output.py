"""A Delta table as output: the parts become its data files where they lie, by one commit of add actions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.messages import listed
from pipeline.tables.column_types import check_columns, check_types
from pipeline.tables.delta import find_table, read_commit, store_options
from pipeline.tables.table import CommitConflict, PartFile
from pipeline.tables.urls import real_url

FINGERPRINT = "skipdecode.fingerprint"  # in a commit's metadata
RULES = ("delta.constraints.", "delta.invariants")  # configuration by which writers must check each row


class DeltaOutput:
    """See `OutputTable`. Delta's own transaction ids tell which job has committed: they outlive the log's files."""

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
        base = None if table is None else table.transaction_version(_application(fingerprint))
        if table is None or base is None:
            return None
        for version in range(base + 1, table.version() + 1):  # later where other writers were faster
            with suppress(FileNotFoundError):  # the log of so old a commit is gone
                if fingerprint.encode() in read_commit(self.url, self.storage, version):
                    return version
        return base + 1

    def append(self, parts: Sequence[PartFile], schema: pa.Schema, fingerprint: str) -> int:
        table = find_table(self.url, self.storage) or self._created(schema)
        self._check_table(table, schema)
        if table.transaction_version(_application(fingerprint)) is not None:  # the library compares later commits only
            raise CommitConflict(f"{self.url} has this job's commit by now")
        application = Transaction(_application(fingerprint), table.version())
        properties = CommitProperties(custom_metadata={FINGERPRINT: fingerprint}, app_transactions=[application])
        try:
            table.create_write_transaction(
                [self._added(part) for part in parts], "append", Schema.from_arrow(schema), commit_properties=properties
            )
        except CommitFailedError as error:
            raise CommitConflict(flat(error)) from None
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

    def _check_table(self, table: DeltaTable, schema: pa.Schema) -> None:
        metadata = table.metadata()
        if metadata.partition_columns:
            names = listed(metadata.partition_columns)
            raise UserError(f"output.table: {self.url} is partitioned by {names}; parts are not: choose another table")
        rule = next((key for key in metadata.configuration if key.startswith(RULES)), None)
        if rule is not None:
            raise UserError(f"output.table: {self.url} checks rows by {rule}, which parts are not held to")
        fields = table.schema().fields
        required = next((field.name for field in fields if not field.nullable), None)
        if required is not None:
            raise UserError(f"output.table: {self.url} does not allow null in {required!r}, which an answer may be")
        there, ours = (
            {field.name: field.type.to_json().strip('"') for field in some}
            for some in (fields, Schema.from_arrow(schema).fields)
        )
        check_columns(self.url, there, ours)

    def _added(self, part: PartFile) -> AddAction:
        prefix = f"{self.url}/"
        assert part.url.startswith(prefix), "checked when the job was planned"
        return AddAction(
            path=part.url.removeprefix(prefix),
            size=part.size,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": part.rows}),
        )


def _application(fingerprint: str) -> str:
    return f"skipdecode-{fingerprint}"
