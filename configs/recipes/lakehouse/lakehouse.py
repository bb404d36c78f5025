"""Answer the rows of a Delta or Iceberg table, and add the answers to another table.

    lakehouse.py list TABLE TEMPLATE.yaml JOB.yaml             write a job over the files of the table's newest version
    lakehouse.py register JOB.yaml ANSWERS                     add the parts of finished runs to the table ANSWERS
    lakehouse.py night TABLE TEMPLATE.yaml JOB.yaml ANSWERS    list what was appended, run, register, note the version

A Delta table is a folder, local or s3://. An Iceberg table is catalog:namespace.table; pyiceberg finds the catalog in
its own settings, such as PYICEBERG_CATALOG__DEMO__URI.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import yaml
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.manifest import FileFormat
from pyiceberg.table.snapshots import Operation, ancestors_between_ids

Pin = tuple[str, int]  # a table's id, and its version (Delta) or snapshot id (Iceberg)
REMEDY = "write the rows into Parquet files and answer these: README.md shows how"


def delta_files(folder: str, since: Pin | None) -> tuple[Pin, list[str]]:
    """Return (table id, version) and the data files: all, or those that were appended after `since`."""
    table = DeltaTable(folder)
    pin = str(table.metadata().id), table.version()
    if pa.table(table.deletion_vectors()).num_rows:
        sys.exit(f"{folder}: deletion vectors delete rows of its files; {REMEDY}")
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        sys.exit(f"{folder}: its columns have other names in its files; {REMEDY}")
    if since is None:
        return pin, table.file_uris()
    if since[0] != pin[0] or since[1] > pin[1]:
        sys.exit(f"{folder}: not the table that was answered at version {since[1]}; {REMEDY}")
    fs, path = fsspec.url_to_fs(folder)
    files = []
    for version in range(since[1] + 1, pin[1] + 1):
        try:
            log = fs.cat_file(f"{path}/_delta_log/{version:020}.json")
        except FileNotFoundError:
            sys.exit(f"{folder}: the log of version {version} is gone, so new rows are not known; {REMEDY}")
        for action in map(json.loads, log.splitlines()):
            if action.get("remove", {}).get("dataChange"):
                sys.exit(f"{folder}: version {version} changed or deleted rows since version {since[1]}; {REMEDY}")
            if action.get("add", {}).get("dataChange"):
                files.append(fs.unstrip_protocol(f"{path}/{unquote(action['add']['path'])}").removeprefix("file://"))
    return pin, files


def iceberg_files(name: str, since: Pin | None) -> tuple[Pin, list[str]]:
    """Return (table id, snapshot) and the data files: all, or those that were appended after `since`."""
    catalog, place = iceberg(name)
    table = catalog.load_table(place)
    newest = table.current_snapshot()
    if newest is None:
        sys.exit(f"{name}: the table has no rows yet")
    pin = str(table.metadata.table_uuid), newest.snapshot_id
    columns = {(field.field_id, field.name) for schema in table.schemas().values() for field in schema.fields}
    if not len(columns) == len(dict(columns)) == len({column for _, column in columns}):
        sys.exit(f"{name}: columns were renamed, and old files hold the old names; {REMEDY}")
    if since is None:
        tasks = table.scan(snapshot_id=pin[1]).plan_files()
    elif since == pin:
        return pin, []
    else:
        try:
            between = list(ancestors_between_ids(since[1], pin[1], table.metadata))
            tasks = table.incremental_append_scan(
                from_snapshot_id_exclusive=since[1], to_snapshot_id_inclusive=pin[1]
            ).plan_files()
        except ValueError as error:
            sys.exit(f"{name}: new rows since snapshot {since[1]} are not known: {error}; {REMEDY}")
        for one in between:
            if one.summary is None or one.summary.operation not in (Operation.APPEND, Operation.REPLACE):
                sys.exit(f"{name}: snapshot {one.snapshot_id} changed or deleted rows; {REMEDY}")
    files = list(tasks)
    for task in files:
        if task.delete_files or task.file.file_format != FileFormat.PARQUET:
            sys.exit(f"{task.file.file_path}: rows are deleted by delete files, or it is not Parquet; {REMEDY}")
    return pin, [task.file.file_path.removeprefix("file://") for task in files]


def iceberg(name: str) -> tuple[Catalog, str]:
    """Return the catalog and the name in it of a table catalog:namespace.table."""
    catalog, table = name.split(":")
    return load_catalog(catalog), table


def is_iceberg(table: str) -> bool:
    return ":" in table and "://" not in table


def list_files(table: str, template: str, job: str, since: Pin | None = None) -> tuple[Pin, bool]:
    """Write `job`: the template with the table's files as its input. Without files, write nothing and return False."""
    pin, files = (iceberg_files if is_iceberg(table) else delta_files)(table, since)
    print(f"{table}, version {pin[1]}: {len(files)} files to answer")
    if files:
        values = yaml.safe_load(Path(template).read_text())
        values["input"] |= {"format": "parquet", "path": sorted(files)}
        Path(job).parent.mkdir(parents=True, exist_ok=True)
        Path(job).write_text(yaml.safe_dump(values, allow_unicode=True))
    elif since is None:
        sys.exit(f"{table}: the table has no rows yet")
    return pin, bool(files)


def register(job: str, table: str) -> None:
    """Add the parts of each finished run to a table, unless they are in it already."""
    fs, root = fsspec.url_to_fs(yaml.safe_load(Path(job).read_text())["output"]["path"])
    for success in sorted(fs.glob(f"{root}/**/_SUCCESS")):
        parts = sorted(fs.glob(f"{os.path.dirname(success)}/part-*.parquet"))
        with fs.open(parts[0]) as file:
            schema = pq.read_schema(file)
        fingerprint = schema.metadata[b"skipdecode.fingerprint"].decode()
        if is_iceberg(table):
            catalog, name = iceberg(table)
            catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
            target = catalog.create_table_if_not_exists(name, schema.remove_metadata())
            held = set(target.inspect.files()["file_path"].to_pylist())
            if new := [url for url in map(fs.unstrip_protocol, parts) if url not in held]:
                target.add_files(new)
        elif not DeltaTable.is_deltatable(table) or DeltaTable(table).transaction_version(fingerprint) is None:
            once = CommitProperties(app_transactions=[Transaction(fingerprint, 1)])
            rows = ds.dataset(parts, filesystem=fs).scanner().to_reader()
            write_deltalake(table, rows, mode="append", commit_properties=once)


def night(table: str, template: str, job: str, answers: str) -> None:
    """Finish the last night if it was cut short. Then answer the files that were appended since its version."""
    notes, since = Path(job).with_suffix(".version"), None
    if notes.exists():
        answer(job, answers)
        since = tuple(json.loads(notes.read_text()))
    pin, new = list_files(table, template, job, since)
    notes.with_suffix(".new").write_text(json.dumps(pin))
    notes.with_suffix(".new").replace(notes)
    if new:
        answer(job, answers)


def answer(job: str, table: str) -> None:
    """Run the job, which does nothing if all its files are answered, and register its parts."""
    subprocess.run(["skipdecode", "run", job], check=True)
    register(job, table)


if __name__ == "__main__":
    {"list": list_files, "register": register, "night": night}[sys.argv[1]](*sys.argv[2:])
