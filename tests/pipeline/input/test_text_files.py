"""JSON Lines and CSV files: every row once and in order, whatever the shards; types of all rows; errors by row."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.engine.errors import UserError
from pipeline.config.input import InputFormat
from pipeline.config.job import StorageConfig
from pipeline.input import text_files, text_lines
from pipeline.input.files import InputFile, file_format, list_files
from pipeline.input.rows import common_schema, from_ipc, read_layout, read_rows, to_ipc
from pipeline.input.schema import one_schema, split_errors
from pipeline.input.shards import Shard, cut_shards, group_shards
from pipeline.input.text_files import TextColumns, with_json_fields
from pipeline.input.text_lines import BOM
from pipeline.messages import is_unicode
from pipeline.storage.parquet import parquet_bytes, read_parquet

LOCAL = StorageConfig()


def scan(path: Path | str, columns: TextColumns, storage: StorageConfig = LOCAL) -> tuple[InputFile, pa.Schema]:
    ((url, (size, version)),) = list_files([str(path)], storage).items()
    file, schema = read_layout(url, size, version, storage, file_format(url, None), columns)
    return file, with_json_fields(one_schema(columns.names, {url: schema}), columns.as_json)


def rows_of(
    file: InputFile, schema: pa.Schema, shards: list[Shard], storage: StorageConfig = LOCAL
) -> list[tuple[dict[str, Any], str | None]]:
    found: list[tuple[dict[str, Any], str | None]] = []
    for task in group_shards(shards, [file], 7, 10**6):
        for shard, table in zip(task, read_rows(task, file, schema, storage), strict=True):
            assert table.num_rows == shard.rows
            values, errors = split_errors(table)
            assert values.schema.equals(schema)
            found += zip(values.to_pylist(), errors, strict=True)
    return found


def read(path: Path, columns: TextColumns | list[str], shard_rows: int = 3) -> list[tuple[dict[str, Any], str | None]]:
    columns = columns if isinstance(columns, TextColumns) else TextColumns(columns)
    file, schema = scan(path, columns)
    return rows_of(file, schema, cut_shards([file], shard_rows, 10**6))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.fixed_dictionaries(
    {"n": st.none() | st.integers(-(2**63), 2**63 - 1)},
    optional={
        "text": st.none() | TEXTS,
        "meta": st.fixed_dictionaries(
            {}, optional={"a": TEXTS, "b": st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=2)}
        ),
        "unused": st.booleans() | TEXTS,
    },
)
BLANK = st.sampled_from([b"", b"\n", b"  \r\n", b"\t\n\n"])


@given(
    st.lists(st.tuples(VALUES, BLANK, st.booleans()), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 400),
    st.integers(1, 5),
    st.integers(10, 200),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_comes_out_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[dict[str, Any], bytes, bool]],
    shard_rows: int,
    shard_bytes: int,
    group_rows: int,
    group_bytes: int,
    is_packed: bool,
    ends: bool,
) -> None:
    """Against `json.loads` of each line; some lines are damaged, some blank."""
    data, expected = b"", []
    for values, blank, damaged in rows:
        line = json.dumps(values, ensure_ascii=len(data) % 2 == 0).encode()
        data += blank + (line[:-1] if damaged else line) + b"\n"
        expected.append(None if damaged else values)
    data = data if ends else data.removesuffix(b"\n")
    folder = tmp_path_factory.mktemp("text")
    path = folder / ("a.jsonl.gz" if is_packed else "a.jsonl")
    path.write_bytes(gzip.compress(data, 1, mtime=0) if is_packed else data)
    wanted = [name for name in ("n", "text", "meta") if any(values and name in values for values in expected)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "GROUP_ROWS", group_rows)
        patch.setattr(text_files, "GROUP_BYTES", group_bytes)
        if not any(expected):
            with pytest.raises(UserError, match="read, and none holds a JSON object"):
                scan(path, TextColumns(["n"]))
            return
        file, schema = scan(path, TextColumns(wanted))
    assert file.rows == len(rows) and max(file.group_rows) <= group_rows
    shards = cut_shards([file], shard_rows, shard_bytes)
    assert [shard.first_row for shard in shards] == [sum(s.rows for s in shards[:at]) for at in range(len(shards))]
    assert max(shard.rows for shard in shards) <= shard_rows
    found = rows_of(file, schema, shards)
    assert len(found) == len(rows)
    for (values, error), line in zip(found, expected, strict=True):
        if line is None:
            assert error is not None and error.startswith("not JSON") and not any(values.values())
            continue
        assert error is None
        meta = line.get("meta")
        if meta and "meta" in wanted:
            assert {name: value for name, value in values["meta"].items() if value is not None} == meta
        assert all(values[name] == line.get(name) for name in wanted if name != "meta")
    for shard in shards[::-1]:  # a shard alone, as after a resume
        assert rows_of(file, schema, [shard]) == found[shard.first_row : shard.first_row + shard.rows]


def strict_rows(data: bytes) -> list[tuple[list[str], str | None]] | None:
    """Rows of a CSV by the standard library's strict reader; after an error it goes on with the next line.

    None if a quote stays open at the end.
    """
    rows: list[tuple[list[str], str | None]] = []
    lines = io.BytesIO(data).readlines()
    while lines:
        lines[0] = lines[0].removeprefix(BOM)
        reader = csv.reader((line.decode(errors="surrogateescape") for line in lines), strict=True)
        try:
            fields = next(reader)
            lines = lines[reader.line_num :]
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                return None
            rows.append(([], "not "))
            lines = lines[1:]
            continue
        if fields:
            rows.append((fields, None if is_unicode("".join(fields)) else "not UTF-8"))
    return rows


@given(
    st.lists(
        st.sampled_from([b'"', b'"', b",", b"\n", b"\n", b"\r", b"\r\n", b"a", b" ", b"\0", BOM, b"\xff"]), max_size=40
    ),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
@example(
    [b'"a"', b"b,", b'"c', b"\n", b'd"', b"\n", b"a"], 3, 2, 5, False
)  # text behind a quote, then a quoted line end
@example([b"a\rb", b',"c', b"\n", b'd"', b"\n", b'"a', b"\n", b'b"'], 3, 2, 5, False)
@example([b'a"b', b"\n", BOM, b'"a', b"\n", BOM, b'b"', b"\n"], 3, 2, 5, True)
def test_csv_rows_are_those_of_the_standard_reader(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
    shard_rows: int,
    group_rows: int,
    buffer: int,
    is_packed: bool,
) -> None:
    """Whatever quotes, line ends and marks stand where; a quote that stays open is refused."""
    data = BOM + b'"a",b\n' + b"".join(pieces)
    path = tmp_path_factory.mktemp("csv") / ("a.csv.gz" if is_packed else "a.csv")
    path.write_bytes(gzip.compress(data, 1, mtime=0) if is_packed else data)
    expected = strict_rows(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "GROUP_ROWS", group_rows)
        patch.setattr(text_lines, "BUFFER", buffer)
        if expected is None:
            with pytest.raises(UserError, match=r"a\.csv(\.gz)?: line \d+: a quote is opened and never closed"):
                scan(path, TextColumns(["b"]))
            return
        file, schema = scan(path, TextColumns(["b"]))
    found = rows_of(file, schema, cut_shards([file], shard_rows, 10**6))
    assert len(found) == len(expected) - 1 == file.rows
    for (values, error), (row, refused) in zip(found, expected[1:], strict=True):
        if row == ["a", "b"]:
            assert error is not None and error.startswith("the row repeats the column names")
        elif refused is None and len(row) == 2:
            assert (values, error) == ({"b": row[1]}, None)
        else:
            wrong = refused or f"{len(row)} fields, but the first line names 2 columns"
            assert error is not None and error.startswith(wrong) and values == {"b": None}


def test_a_suffix_counts_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "GROUP_ROWS", 1)
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"n": 1}\n{"n": 2}\n'))
    write(tmp_path / "b.Jsonl", {"n": 3})
    assert [Path(url).name for url in list_files([str(tmp_path)], LOCAL, "jsonl")] == ["A.JSONL.GZ", "b.Jsonl"]
    file, schema = scan(tmp_path / "A.JSONL.GZ", TextColumns(["n"]))
    shards = cut_shards([file], 1, 10**6)
    assert rows_of(file, schema, shards) == [({"n": 1}, None), ({"n": 2}, None)]
    assert group_shards(shards, [file], 1, 10**6) == [shards]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_quote_that_is_never_closed_is_refused_with_its_line(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the file's end, or soon after `field_bytes`, without a look at the rest. A long field that ends too."""
    monkeypatch.setattr(text_lines, "BUFFER", 100)

    def refusal(data: bytes, field_bytes: int) -> str:
        path = tmp_path / f"a.csv{suffix}"
        path.write_bytes(gzip.compress(data) if suffix else data)
        with pytest.raises(UserError) as refused:
            scan(path, TextColumns(["b"], field_bytes=field_bytes))
        return str(refused.value).removeprefix(f"{path}: ")

    rows = b"".join(b'%d,"x\ny"\n' % row for row in range(50))
    never = 'a quote is opened and never closed; close it, or write "" for a quote in quoted text'
    long = "a quote is opened for a field of more than 99 bytes: it is probably not closed; close it, or raise "
    assert refusal(b"a,b\n" + rows + b'1,"x\n' + rows.replace(b'"', b"'"), 10**6) == f"line 102: {never}"
    assert refusal(b'"a,b\n1,2', 10**6) == f"line 1: {never}"
    assert (
        refusal(b"a,b\n" + rows + b'1,2\n1,"' + b"x" * 100 + b'"\n1,2\n', 99)
        == f"line 103: {long}input.csv_field_bytes"
    )
    assert refusal(b'a,b\n1,"' + b"x\n" * 100 + b"\xff" * 10**6, 99) == f"line 2: {long}input.csv_field_bytes"
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n" + rows + b'1,"x\n' + b"2,y\n" * 200 + rows)  # text behind the next quote shows the damage
    found = read(path, ["a"])
    assert len(found) == 301 and [(row, error) for row, (_, error) in enumerate(found) if error] == [
        (50, "not CSV: a quote is opened and not closed (row 50 of 'a.csv', counted from 0)")
    ]
    path.write_bytes(b'a,b\n1,"x" y\n2,y\n')
    assert read(path, ["a"])[0][1].startswith("""not CSV: Error: ',' expected after '"' (row 0 of""")
    path.write_bytes(b"a,b\n1," + b"x" * 200 + b'\n1,"' + b"x" * 99 + b'"\n')
    assert scan(path, TextColumns(["b"], field_bytes=99))[0].rows == 2


def write(path: Path, *lines: object) -> Path:
    """Lines as JSON, or as they are."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_a_value_of_another_type_costs_its_row_only(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"p": "a", "n": 1, "l": ["x"], "o": {"a": True}},
        {"p": 5, "n": 1.5, "l": "xy", "o": [1]},
        {"p": "b", "n": True, "l": [], "o": {"a": 1}},
        {"p": "\ud800", "n": 2**53 + 1, "l": ["y", 2], "o": {"a": None, "b": 1.5}},
        {"n": "1"},
        [1],
        b"\xff",
        b'{"p": NaN}',
        b'{"p": "a", "o": {"a": true, "a": true}}',
        b"[" * 100_000,
    )
    found = read(path, ["p", "n", "l", "o"])
    assert [error and error.partition(" (row ")[0] for _, error in found] == [
        None,
        "column p: a number that does not fit string: 5",
        "column n: true or false that does not fit double: true",
        "column p: text is not valid Unicode: it holds a lone surrogate",
        'column n: text that does not fit double: "1"',
        "not a JSON object: the line is a list",
        "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "not JSON: ValueError: NaN is not JSON",
        "not JSON: ValueError: key 'a' occurs twice in one object",
        str(found[9][1]).partition(" (row ")[0],
    ]
    assert str(found[9][1]).startswith("not JSON: RecursionError")
    assert found[0][0] == {"p": "a", "n": 1.0, "l": ["x"], "o": {"a": True, "b": None}}
    assert found[1][0] == {"p": "5", "n": 1.5, "l": None, "o": None}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("levels", "is_good"), [(30, True), (50, False), (64, False), (99, False), (2000, False)])
def test_a_deep_row_costs_its_row_only(tmp_path: Path, levels: int, is_good: bool, place: int) -> None:
    """Arrow IPC and Parquet hold fewer levels than JSON, and Python recurses to fewer."""
    rows = [{"text": "x", "p": [[]]}] * 2
    deep = json.dumps(rows[0]).encode().replace(b"[[]]", b"[" * levels + b"]" * levels)
    found = read(write(tmp_path / "a.jsonl", *rows[:place], deep, *rows[place:]), ["p", "text"])
    assert [error is None for _, error in found] == [is_good or row != place for row in range(3)]
    tree = json.dumps({"a": [{"a": []}]}).encode()
    deep = b'{"a": [' * (levels // 2) + b"]}" * (levels // 2)
    lines = [b'{"tree": ' + one + b"}" for one in (*[tree] * place, deep, *[tree] * (2 - place))]
    path = write(tmp_path / "b.jsonl", *lines)
    found = read(path, ["tree"])
    assert [error is None for _, error in found] == [levels < 64 or row != place for row in range(3)]
    table = pa.table({"tree": [values["tree"] for values, _ in found]}, scan(path, TextColumns(["tree"]))[1])
    assert from_ipc(to_ipc(table)) == read_parquet(parquet_bytes(table)) == table
    kept = read(path, TextColumns(["tree"], frozenset({"tree"})))
    assert [error is None for _, error in kept] == [levels < 100 or row != place for row in range(3)]


def test_the_type_of_most_rows_is_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"n": "none"}, {"n": 1}, {"n": 2}, {"n": None}, {})
    assert [error is None for _, error in read(path, ["n"])] == [False, True, True, True, True]
    assert scan(path, TextColumns(["n"]))[1].field("n").type == pa.int64()


def test_integers_beyond_64_bits_and_negative_ones_among_hashes_are_row_errors(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.jsonl", {"n": 2**64 - 1}, {"n": 5}, {"n": 2**64}), ["n"])
    assert found == [
        ({"n": 2**64 - 1}, None),
        ({"n": 5}, None),
        ({"n": None}, f"column n: a number that does not fit uint64: {2**64}"),
    ]
    path = write(tmp_path / "b.jsonl", {"n": 5}, {"n": 2**63}, {"n": -1})
    assert [values["n"] for values, _ in read(path, ["n"])] == [5, None, -1]


def test_an_empty_object_is_null_only_in_a_column_without_a_type(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"p": "a", "n": 1, "l": [1], "o": {}}, *[{"p": {}, "n": {}, "l": {}, "o": {}}] * 2
    )
    for name, kind in (("p", "string"), ("n", "int64"), ("l", "list<item: int64>")):
        error = f"column {name}: an object that does not fit {kind}: {{}}"
        assert [found for _, found in read(path, [name])] == [None, error, error]
    assert read(path, ["o"]) == [({"o": None}, None)] * 3


def test_types_are_those_of_the_first_rows_and_of_some_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later value of another type is its row's error; a column without any value so far is looked for everywhere."""
    monkeypatch.setattr(text_lines, "BUFFER", 500)
    monkeypatch.setattr(text_files, "TYPED_ROWS", 10)
    monkeypatch.setattr(text_files, "TYPED_BLOCKS", 10**9)
    rows: list[dict[str, Any]] = [{"n": row, "o": {"a": row}, "late": None, "x": "n"} for row in range(600)]
    rows[500] |= {"n": 0.5, "o": {"a": 1, "b": "c" * 100}}
    rows[550] |= {"late": {"z": 2**53 + 1}, "mai\u00e9": True}
    path = write(tmp_path / "a.jsonl", *rows)
    wanted = TextColumns(["n", "o", "late", "mai\u00e9"])
    schema = scan(path, wanted)[1]
    assert schema.types == [pa.int64(), pa.struct({"a": pa.int64()}), pa.struct({"z": pa.int64()}), pa.bool_()]
    found = read(path, wanted, 64)
    assert [row for row, (_, error) in enumerate(found) if error is not None] == [500]
    assert found[500][1] == "column n: a number that does not fit int64: 0.5"
    assert found[550][0] == {"n": 550, "o": {"a": 550}, "late": {"z": 2**53 + 1}, "mai\u00e9": True}
    cut = '{"a": 1, "b": "' + "c" * 65 + "\u2026"
    assert read(path, ["o"], 64)[500][1] == f"column o: an object that does not fit struct<a: int64>: {cut}"
    monkeypatch.setattr(text_files, "TYPED_BLOCKS", 1)
    assert scan(path, wanted)[1].types[:2] == [pa.float64(), pa.struct({"a": pa.int64(), "b": pa.string()})]


def test_a_column_of_json_keeps_it(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "\ud800"}]
    path = write(tmp_path / "a.jsonl", {"m": chat}, {"m": json.dumps(chat)}, {"m": None})
    found = read(path, TextColumns(["m"], frozenset({"m"})))
    assert [error for _, error in found] == [None] * 3
    assert [values["m"] and json.loads(values["m"]) for values, _ in found] == [chat, chat, None]


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"q": 1}\n{"q": 2}\n'), ("a.csv", "q\n1\n2\n")])
def test_a_job_that_reads_no_column_has_all_rows(tmp_path: Path, name: str, text: str) -> None:
    """Its template is constant, or names the columns of folders alone."""
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name, []) == [({}, None)] * 2
    (tmp_path / "lang=de").mkdir()
    (tmp_path / "lang=de" / name).write_text(text)
    file, schema = scan(tmp_path / "lang=de" / name, TextColumns([]))
    schema = common_schema([(file, schema)], ["lang"], LOCAL)
    for fields in (schema, with_json_fields(schema, frozenset({"lang"}))):
        assert rows_of(file, fields, cut_shards([file], 3, 10**6)) == [({"lang": "de"}, None)] * 2


def test_csv_fields_that_cannot_be_read_cost_their_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbft,p\n1,a\n8,\xff\n\xef\xbb\xbft,p\n")  # two files, one behind the other
    found = read(path, TextColumns(["t", "p"]))
    assert found[0] == ({"t": "1", "p": "a"}, None)
    assert found[1][1] == "not UTF-8 (row 1 of 'a.csv', counted from 0)"
    assert found[2][1].startswith("the row repeats the column names of the first line (row 2 of ")
    path.write_bytes(b"t\nx\n0.5\n")
    file, _ = scan(path, TextColumns(["t"]))
    found = rows_of(file, pa.schema([("t", pa.float64())]), cut_shards([file], 3, 10**6))
    assert str(found[0][1]).startswith("column t: ") and found[1] == ({"t": 0.5}, None)
    path.write_bytes(b"s\n\n{}\n,\n")
    assert read(path, TextColumns(["s"], frozenset({"s"})))[0] == ({"s": "{}"}, None)


TWICE = gzip.compress(gzip.compress(b'{"p": 1}\n', mtime=0), mtime=0)


@pytest.mark.parametrize(
    ("name", "data", "refusal"),
    [
        ("a.jsonl", b'[\n{"p": "a"}\n]', "the file is one JSON array; write one object per line (JSON Lines)"),
        ("a.jsonl", b'[{"p": "a"},\n{"p": "b"}]', "the file is one JSON array; write one object per line (JSON Lines)"),
        ("a.jsonl", b'{"q": 1}\n', "no column 'p'; it has q"),
        ("a.jsonl", '{"p": 1}'.encode("utf-16"), "the text is UTF-16; convert it to UTF-8"),
        ("a.jsonl", b"PAR1", "the file is Parquet; rename it to match, or set input.format"),
        ("a.jsonl.gz", TWICE, "the file is packed twice; unpack it once"),
        ("a.jsonl", gzip.compress(b'{"p": 1}\n', mtime=0), "the file is gzip; add .gz to its name"),
        ("a.jsonl", b"p\n", "1 line read, and none holds a JSON object"),
        ("a.jsonl.gz", gzip.compress(b'{"p": 1}\n' * 99, mtime=0)[:-9], "not readable as gzip: "),
        ("a.jsonl.gz", b'{"p": 1}\n', "not readable as gzip: Not a gzipped file"),
        ("a.csv", b"p,q\r1,2\r", "the first line must name the columns: not CSV: a carriage return is not followed by"),
        ("a.csv", b"", "the file is empty; its first line must name the columns"),
        ("a.csv", b"id;text\n1;a\n", "the first line has no comma, but ';': columns must be separated by commas"),
        ("a.csv", b"q\n1\n", "no column 'p'; it has q"),
        ("a.csv", b'id, p,"a,b",,\xc2\xa0p\n1,2,3,4,5\n', "no column 'p'; it has id, ' p', 'a,b', '', '\\xa0p'"),
        ("a.csv", b"p,p\n1,2\n", "column 'p' occurs 2 times; rename all but one"),
    ],
)
def test_a_file_that_is_no_such_text_is_refused(tmp_path: Path, name: str, data: bytes, refusal: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as refused:
        scan(tmp_path / name, TextColumns(["p"]))
    assert str(refused.value).startswith(f"{tmp_path / name}: {refusal}")


def test_a_line_of_any_length_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.input.text_lines.LONGEST_RECORD", 2**20)
    path = write(tmp_path / "a.jsonl", {"p": "x" * 2**20})
    with pytest.raises(UserError, match="a line is longer than 1 MiB"):
        scan(path, TextColumns(["p"]))


def test_fewer_rows_than_planned_is_an_error(tmp_path: Path) -> None:
    for name, line in (("a.jsonl", b'{"p": "a"}\n'), ("a.csv.gz", b"p\n")):
        path = tmp_path / name
        content = line * 10
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        file, schema = scan(path, TextColumns(["p"]))
        path.write_bytes(gzip.compress(line * 4) if name.endswith("gz") else line * 4)
        with pytest.raises(UserError, match=rf"{name}: cannot be read, since it is damaged or cut short: fewer rows"):
            list(read_rows([Shard(0, file.url, 3, 5)], file, schema, LOCAL))


@pytest.mark.parametrize("given", [None, "jsonl"])
def test_a_folder_gives_the_files_of_the_format(tmp_path: Path, given: InputFormat | None) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "_d.jsonl"):
        (tmp_path / name).write_bytes(b"")
    if given is None:
        with pytest.raises(UserError) as refused:
            list_files([str(tmp_path)], LOCAL)
        held = f"{tmp_path}: folder without .parquet files; it has csv and jsonl files: set input.format"
        assert str(refused.value) == held
    else:
        assert list(list_files([str(tmp_path)], LOCAL, given)) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl.gz"]


def test_files_in_a_bucket_are_read_by_range(s3: StorageConfig, tmp_path: Path) -> None:
    from pipeline.storage.folder import open_folder

    folder = open_folder("s3://bucket/text", s3)
    rows = [{"p": f"row {row} " + "x" * 200} for row in range(3000)]
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for name, content in (("a.jsonl", data), ("b.jsonl.gz", gzip.compress(data))):
        folder.replace(name, content)
        file, schema = scan(f"s3://bucket/text/{name}", TextColumns(["p"]), s3)
        assert file.group_rows == (1024, 1024, 952)
        shards = cut_shards([file], 900, 10**6)
        assert [values for values, _ in rows_of(file, schema, shards, s3)] == rows
        assert [values for values, _ in rows_of(file, schema, shards[2:3], s3)] == rows[1800:2700]
