"""Iceberg and Delta tables of tests, read and written by the libraries themselves, apart from the code under test."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from in_process import job_config
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT

from pipeline.config.job import JobConfig, StorageConfig
from pipeline.storage.folder import open_folder

LOCAL = StorageConfig()


class IcebergTables:
    """A SQL catalog in a file; the warehouse in a local folder or a bucket. root: folder for outputs.

    Names of tables are namespace.table.
    """

    kind = "iceberg"

    def __init__(self, folder: Path, root: str, store: StorageConfig) -> None:
        self.root = root
        self.store = store
        self.uri = f"sqlite:///{folder}/catalog.db"
        own = {"s3.endpoint": store.endpoint_url, "s3.region": "us-east-1"} if store.endpoint_url else {}
        self.catalog: Catalog = load_catalog("test", type="sql", uri=self.uri, warehouse=f"{root}/warehouse", **own)

    def storage(self) -> dict[str, Any]:
        """The job's section `storage`."""
        catalog = {"name": "test", "type": "sql", "uri": self.uri, "warehouse": f"{self.root}/warehouse"}
        return {**self.store.model_dump(exclude_none=True, exclude={"catalog"}), "catalog": catalog}

    def path(self, name: str) -> str:
        """What a job file calls a table."""
        return name

    def table(self, name: str) -> Table:
        return self.catalog.load_table(name)

    def append(self, name: str, rows: pa.Table) -> None:
        self.catalog.create_namespace_if_not_exists(name.split(".")[0])
        self.catalog.create_table_if_not_exists(name, rows.schema)
        self.table(name).append(rows)

    def delete(self, name: str, condition: str) -> None:
        self.table(name).delete(condition)

    def compact(self, name: str) -> None:
        """Rewrite all data files as one; no row changes."""
        table = self.table(name)
        old = [task.file for task in table.scan().plan_files()]
        rows = table.scan().to_arrow()
        with table.transaction() as transaction:
            producer = _Replace(operation=Operation.OVERWRITE, transaction=transaction, io=table.io)
            for new in _dataframe_to_data_files(table.metadata, rows, table.io):
                producer.append_data_file(new)
            for file in old:
                producer.delete_data_file(file)
            producer.commit()

    def expire(self, name: str) -> None:
        """Forget how the table came to its newest snapshot."""
        self.table(name).maintenance.expire_snapshots().by_ids(self.snapshots(name)[:-1]).commit()

    def rows(self, name: str) -> pa.Table:
        return self.table(name).scan().to_arrow()

    def snapshots(self, name: str) -> list[int]:
        """Snapshots with their own rows, oldest first."""
        return [snapshot.snapshot_id for snapshot in self.table(name).snapshots()]


class _Replace(_OverwriteFiles):
    """A compaction as other engines commit it; pyiceberg has none."""

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        summary = super()._summary(snapshot_properties)
        return Summary(Operation.REPLACE, **summary.additional_properties)


class DeltaTables:
    """Folders of tables, local or in a bucket; see `IcebergTables`."""

    kind = "delta"

    def __init__(self, root: str, store: StorageConfig) -> None:
        self.root = root
        self.store = store
        self.options = {"endpoint_url": store.endpoint_url, "allow_http": "true"} if store.endpoint_url else {}

    def storage(self) -> dict[str, Any]:
        return self.store.model_dump(exclude_none=True, exclude={"catalog"})

    def path(self, name: str) -> str:
        return f"{self.root}/{name.replace('.', '/')}"

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(self.path(name), storage_options=self.options)

    def append(self, name: str, rows: pa.Table) -> None:
        write_deltalake(self.path(name), rows, mode="append", storage_options=self.options)

    def delete(self, name: str, condition: str) -> None:
        self.table(name).delete(condition)

    def compact(self, name: str) -> None:
        self.table(name).optimize.compact()

    def expire(self, name: str) -> None:
        log = Path(self.path(name)) / "_delta_log"
        self.table(name).create_checkpoint()
        for file in sorted(log.glob("*.json"))[:-1]:
            file.unlink()

    def rows(self, name: str) -> pa.Table:
        return self.table(name).to_pyarrow_table()

    def snapshots(self, name: str) -> list[int]:
        # not by history(): it holds the interpreter's lock, and the bucket is served by this process
        log = open_folder(f"{self.path(name)}/_delta_log", self.store)
        commits = {int(file[:20]): log.read(file) for file in log.names() if re.fullmatch(r"\d{20}\.json", file)}
        return [version for version, text in sorted(commits.items()) if b'{"add":' in text or b'{"remove":' in text]


Tables = IcebergTables | DeltaTables


def local_iceberg(folder: Path) -> IcebergTables:
    return IcebergTables(folder, f"{folder}/tables", LOCAL)


def local_delta(folder: Path) -> DeltaTables:
    return DeltaTables(f"{folder}/tables", LOCAL)


def local_tables(kind: str, folder: Path) -> Tables:
    return local_iceberg(folder) if kind == "iceberg" else local_delta(folder)


def bucket_tables(kind: str, folder: Path, store: StorageConfig) -> Tables:
    root = f"s3://bucket/{uuid.uuid4().hex}"
    return IcebergTables(folder, root, store) if kind == "iceberg" else DeltaTables(root, store)


def prompts(first: int, count: int) -> pa.Table:
    """Rows with ids from `first` on."""
    rows = [{"id": f"r{row}", "prompt": f"name[{row}], area[river]"} for row in range(first, first + count)]
    return pa.Table.from_pylist(rows, pa.schema([("id", pa.string()), ("prompt", pa.string())]))


def config(tables: Tables, checkpoint: Path, **sections: Any) -> JobConfig:
    """Return a job with these sections. All other sections have their defaults."""
    own = {"sampling": {"max_new_tokens": 3}, "storage": tables.storage(), "shard_rows": 2, "shared_prefix": False}
    return job_config("", "", checkpoint, **{**own, **sections})


def with_output(job: JobConfig, **changes: Any) -> JobConfig:
    """The job with other values in its section `output`."""
    return job.model_copy(update={"output": job.output.model_copy(update=changes)})
