"""Parquet files with a column that Arrow cannot read, beside one that it can."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

ROWS = 50
UNREADABLE = ("codec", "encoding", "encrypted", "page")


def write_unreadable(path: Path, what: str, column: str = "prompt") -> None:
    """Write a file with the columns `id` and `column`. what: what is wrong with `column`; see `UNREADABLE`."""
    table = pa.table(
        {"id": [f"{path.stem}-{row}" for row in range(ROWS)], column: [f"name[{row}]" for row in range(ROWS)]}
    )
    if what == "encrypted":
        factory = pe.CryptoFactory(lambda config: _NoKms())
        keys = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": [column]}, plaintext_footer=True)
        secret = factory.file_encryption_properties(pe.KmsConnectionConfig(), keys)
        with pq.ParquetWriter(path, table.schema, encryption_properties=secret) as writer:
            writer.write_table(table)
        return
    pq.write_table(table, path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    if what == "page":
        place = data.find(b"name[7]")
        data[place - 4 : place] = b"\xff\xff\xff\x7f"  # the length of this text
    else:
        # a column's metadata in Thrift's compact form: type, encodings (a list of two), path, codec; enums doubled
        name = column.encode()
        before, after = b"\x19\x25\x06\x00\x19\x18" + bytes([len(name)]) + name + b"\x15", b"\x00"
        assert data.count(before + after) == 1
        changed = before + b"\x28" if what == "codec" else before.replace(b"\x06\x00", b"\x06\x42") + after
        data = data.replace(before + after, changed)
    path.write_bytes(data)


class _NoKms(pe.KmsClient):
    """Wraps keys without a key."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)
