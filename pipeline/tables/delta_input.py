"""A Delta table as input: its data files, read as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.messages import listed
from pipeline.tables.delta import find_table, read_commit
from pipeline.tables.table import DataFile, TablePin
from pipeline.tables.urls import real_url, store_url

COMPACT = "rewrite it (OPTIMIZE, or REORG TABLE ... APPLY (PURGE)) and read the new version"


class DeltaInput:
    """See `InputTable`; a snapshot is a version. Only planning reads the log."""

    def __init__(self, path: str, storage: StorageConfig) -> None:
        self.root = real_url(path)
        self.storage = storage
        self._at(None)

    def newest(self) -> TablePin | None:
        table = self._at(None)
        return TablePin(str(table.metadata().id), table.version())

    def data_files(self, snapshot: int) -> list[DataFile]:
        table = self._at(snapshot)
        for batch in table.deletion_vectors():
            for url in pa.record_batch(batch)["filepath"].to_pylist():
                raise self._deleted(store_url(url))
        actions = pa.table(table.get_add_actions())
        return self._files(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))

    def appended(self, after: int, until: int) -> list[DataFile]:
        if until < after:
            raise UserError(f"{self.root}: version {after}, which the last success has answered, is newer than {until}")
        added: list[tuple[str, int]] = []
        for version in range(after + 1, until + 1):
            operation = "unknown"
            for action in self._actions(version, after):
                operation = action.get("commitInfo", {}).get("operation", operation)
                add, remove = action.get("add"), action.get("remove")
                if remove is not None and remove["dataChange"]:
                    raise UserError(
                        f"{self.root}: version {version} ({operation}) changed or deleted rows since version {after}, "
                        "which the last success has answered; answer the whole table into another output.path"
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

    def _at(self, version: int | None) -> DeltaTable:
        table = find_table(self.root, self.storage, version)
        if table is None:
            raise UserError(f"input.path: {self.root} holds no Delta table")
        return table

    def _actions(self, version: int, after: int) -> Iterator[dict[str, Any]]:
        """The actions of a commit, its `commitInfo` first."""
        try:
            text = read_commit(self.root, self.storage, version)
        except FileNotFoundError:
            raise UserError(
                f"{self.root}: the log of version {version} is gone, and with it what was added since version {after}, "
                "which the last success has answered; answer the whole table into another output.path"
            ) from None
        actions = [json.loads(line) for line in text.splitlines() if line.strip()]
        yield from sorted(actions, key=lambda action: "commitInfo" not in action)

    def _files(self, listed: Any) -> list[DataFile]:
        files = [DataFile(self._located(unquote(path)), size) for path, size in listed]
        return sorted(files, key=lambda file: file.url)

    def _located(self, path: str) -> str:
        is_absolute = "://" in path or path.startswith(("/", "file:"))
        return store_url(path) if is_absolute else f"{self.root}/{path}"

    def _deleted(self, path: str) -> UserError:
        return UserError(f"{path}: rows of this data file of {self.root} were deleted by a deletion vector; {COMPACT}")
