"""Rows that a table has deleted while its data file keeps them: delete files and deletion vectors, written by hand.

Neither library writes them; other engines do.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record
from pyroaring import BitMap64

_FILE_PATH, _POS = 2147483546, 2147483545  # field ids of a position delete file
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def delete_by_file(table: Table, folder: Path, equality: bool = False) -> str:
    """Delete the first row of an Iceberg table's first data file by a delete file; the data file."""
    data_file = next(iter(table.scan().plan_files())).file.file_path
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(_FILE_PATH)}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(_POS)}),
        ]
    )
    deletes = folder / "deletes.parquet"
    pq.write_table(pa.table({"file_path": [data_file], "pos": [0]}, schema=schema), deletes)
    content = DataFileContent.EQUALITY_DELETES if equality else DataFileContent.POSITION_DELETES
    bound = data_file.encode()
    delete_file = DataFile.from_args(
        content=content,
        file_path=str(deletes),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=deletes.stat().st_size,
        lower_bounds={_FILE_PATH: bound},
        upper_bounds={_FILE_PATH: bound},
        spec_id=0,
        equality_ids=[1] if equality else None,
    )
    with table.transaction() as transaction, transaction._append_snapshot_producer({}) as producer:
        producer.append_data_file(delete_file)
    return data_file


def delete_by_vector(folder: Path) -> str:
    """Delete the first row of a Delta table's first data file by a deletion vector in its log; the data file.

    The table must have been made with delta.enableDeletionVectors.
    """
    log = folder / "_delta_log"
    version = DeltaTable(str(folder)).version()
    adds = [
        json.loads(line)["add"]
        for file in sorted(log.glob("*.json"))
        for line in file.read_text().splitlines()
        if '"add"' in line
    ]
    data = struct.pack("<i", 1681511377) + BitMap64([0]).serialize()
    padded = data + bytes(-len(data) % 4)
    text = base64.b85encode(padded).translate(bytes.maketrans(_B85, _Z85)).decode()
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": 1}
    add = adds[0]
    remove = {"path": add["path"], "deletionTimestamp": 0, "dataChange": True}
    stats = json.dumps({**json.loads(add["stats"]), "tightBounds": False})
    actions = [
        {"commitInfo": {"timestamp": 0, "operation": "DELETE", "operationParameters": {}}},
        {"remove": remove},
        {"add": {**add, "stats": stats, "deletionVector": vector}},
    ]
    (log / f"{version + 1:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return f"{folder}/{quote(add['path'])}"
