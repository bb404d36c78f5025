"""Tables as Arrow IPC bytes: how a shard's rows travel between stages."""

from __future__ import annotations

import pyarrow as pa


def to_ipc(table: pa.Table) -> bytes:
    """A table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_ipc(data: bytes) -> pa.Table:
    """The table that `to_ipc` wrote."""
    return pa.ipc.open_stream(data).read_all()
