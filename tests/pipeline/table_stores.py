"""Iceberg and Delta tables of tests, in a local folder, read and written by the libraries themselves."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT


class IcebergTables:
    """A SQL catalog in a file. Names of tables are namespace.table."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/catalog.db"
        self.warehouse = f"{folder}/warehouse"
        self.catalog: Catalog = load_catalog("demo", type="sql", uri=self.uri, warehouse=self.warehouse)

    def path(self, name: str) -> str:
        """What the recipe calls a table."""
        return f"demo:{name}"

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
        table = self.table(name)
        table.maintenance.expire_snapshots().by_ids([one.snapshot_id for one in table.snapshots()[:-1]]).commit()

    def rows(self, name: str) -> pa.Table:
        return self.table(name).scan().to_arrow()


class _Replace(_OverwriteFiles):
    """A compaction as other engines commit it; pyiceberg has none."""

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        summary = super()._summary(snapshot_properties)
        return Summary(Operation.REPLACE, **summary.additional_properties)


class DeltaTables:
    """Folders of tables; see `IcebergTables`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, name: str) -> str:
        return f"{self.root}/{name.replace('.', '/')}"

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(self.path(name))

    def append(self, name: str, rows: pa.Table) -> None:
        write_deltalake(self.path(name), rows, mode="append")

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


Tables = IcebergTables | DeltaTables


def prompts(first: int, count: int) -> pa.Table:
    """Rows with ids from `first` on."""
    rows = [{"id": f"r{row}", "prompt": f"name[{row}], area[river]"} for row in range(first, first + count)]
    return pa.Table.from_pylist(rows, pa.schema([("id", pa.string()), ("prompt", pa.string())]))
