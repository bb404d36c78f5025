"""What a writer wrote comes back equal, value by value, whatever its types, names, row groups, shards and packing."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_values import values_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.config.job import StorageConfig
from pipeline.input import text_files
from pipeline.input.files import list_files
from pipeline.input.rows import from_ipc, read_layout, read_shards, to_ipc
from pipeline.input.schema import one_schema, split_errors
from pipeline.input.shards import cut_shards
from pipeline.input.text_files import TextColumns

LOCAL = StorageConfig()
NAMES = ["a", "a.b", "a.c.d", "with space", "\u00e9\U0001f600", "", "007", '"', "twice"]
TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
JSON = [pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string(), pa.null()]
ARROW = [
    *(*JSON, *TEXTS, pa.uint8(), pa.int16(), pa.float32(), pa.binary(), pa.binary(3)),
    *(pa.decimal128(7, 3), pa.date32(), pa.time32("s"), pa.duration("us"), pa.timestamp("ms", "Asia/Tokyo")),
    *(pa.map_(pa.string(), pa.int32()), pa.list_(pa.int8(), 2)),
]


def nested(leaves: list[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.recursive(
        st.sampled_from(leaves),
        lambda below: below.map(pa.list_) | st.lists(below, min_size=1, max_size=3).map(_struct),
        max_leaves=4,
    )


def _struct(kinds: list[pa.DataType]) -> pa.DataType:
    return pa.struct(list(zip(["b", "c", "d"], kinds, strict=False)))


KINDS = {"parquet": nested(ARROW), "jsonl": nested(JSON), "csv": st.just(pa.string())}


@st.composite
def tables(draw: st.DrawFn, format: str) -> pa.Table:
    rows = draw(st.integers(1, 6))
    columns = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        kind = draw(KINDS[format])
        values = values_of(pa.string() if pa.types.is_dictionary(kind) else kind, usual=True)
        columns[name] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(columns)


def written(table: pa.Table, format: str, path: Path, group_rows: int) -> None:
    """Write the table. In Parquet it has another column twice, which nobody needs."""
    if format == "parquet":
        names = [*table.column_names, "other", "other"]
        extra = pa.array(range(table.num_rows))
        pq.write_table(pa.table([*table.columns, extra, extra], names=names), path, row_group_size=group_rows)
        return
    text, rows = io.StringIO(newline=""), table.to_pylist()
    if format == "csv":
        writer = csv.DictWriter(text, table.column_names, quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(row, ensure_ascii=bool(number % 2)) + "\n" for number, row in enumerate(rows))
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data, 1, mtime=0) if path.suffix == ".gz" else data)


@given(
    st.sampled_from(list(KINDS)).flatmap(lambda format: st.tuples(st.just(format), tables(format))),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["", ".gz"]),
)
@example(("jsonl", pa.table({"": pa.array([5, 2**64 - 1, None], pa.uint64())})), 9, 9, "")
@example(("csv", pa.table({"a": ["007", "1.50", "", "{}", None, '"']})), 9, 1, "")
@settings(max_examples=150, deadline=None)
def test_what_was_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, given: tuple[str, pa.Table], group_rows: int, shard_rows: int, packed: str
) -> None:
    format, table = given
    path = tmp_path_factory.mktemp("written") / f"a.{format}{packed if format != 'parquet' else ''}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "GROUP_ROWS", group_rows)
        written(table, format, path, group_rows)
        ((url, (size, version)),) = list_files([str(path)], LOCAL).items()
        file, schema = read_layout(url, size, version, LOCAL, format, TextColumns(table.column_names))
    common = one_schema(table.column_names[::-1], {url: schema})
    shards = cut_shards([file], shard_rows, 10**6)
    found: list[tuple[dict[str, Any], str | None]] = []
    for shard, read in read_shards([file], shards, common, LOCAL):
        assert read.num_rows == shard.rows <= shard_rows
        values, errors = split_errors(from_ipc(to_ipc(read)))
        assert values.schema.equals(common)
        found += zip(values.to_pylist(), errors, strict=True)
    assert len(found) == table.num_rows
    for row, (values, error) in zip(table.to_pylist(), found, strict=True):
        expected = {name: value or "" for name, value in row.items()} if format == "csv" else row
        assert values == expected if error is None else list(expected.values()) == list(row) and format == "csv"
