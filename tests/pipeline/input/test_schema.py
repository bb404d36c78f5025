"""One type for a column over all files, and every value either in it, unchanged, or the error of its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_values import values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.input.schema import ERROR, UNTYPED, common, conform, one_schema, plain, split_errors

STRUCT = pa.struct([("a", pa.int32()), ("b", pa.string())])
TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def bad_text(kind: pa.DataType = TEXTS[0]) -> pa.Array:
    """good, three bytes that are not UTF-8, fine: as a writer that does not check leaves them."""
    offsets = pa.py_buffer(np.array([0, 4, 7, 11], dtype=np.int32).tobytes())
    values = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"good\xff\xfe\xfdfine")])
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), values)
    return values.cast(pa.binary()).cast(kind, safe=False)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.uint64(), pa.int8(), pa.int64()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.null(), STRUCT, STRUCT),
        (pa.binary(4), pa.binary(5), pa.binary()),
        (pa.decimal128(5, 0), pa.int64(), pa.decimal128(20, 0)),
        (pa.decimal128(38, 0), pa.decimal128(10, 8), pa.decimal256(46, 8)),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int8()), pa.large_list(pa.int32()), pa.large_list(pa.int32())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int16(), 3), pa.list_(pa.int16())),
        (pa.list_(pa.null()), pa.list_(STRUCT), pa.list_(STRUCT)),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int32())),
        (
            STRUCT,
            pa.struct([("c", pa.bool_()), ("a", pa.int64())]),
            pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.bool_())]),
        ),
        (pa.string(), pa.binary(), None),
        (pa.date32(), pa.timestamp("s"), None),
        (pa.decimal128(5, 2), pa.float64(), None),
        (pa.decimal256(76, 0), pa.decimal128(5, 5), None),
        (pa.list_(pa.int16()), pa.large_list(pa.decimal128(7, 3)), pa.large_list(pa.decimal128(8, 3))),
        (
            pa.map_(pa.string(), pa.struct([("a", pa.uint8()), ("b", pa.int8())])),
            pa.map_(pa.string(), pa.struct([("a", pa.decimal128(3, 2))])),
            pa.map_(pa.string(), pa.struct([("a", pa.decimal128(5, 2)), ("b", pa.int8())])),
        ),
        (  # b.a has no counterpart: that a is a decimal says nothing about it
            pa.struct([("a", pa.decimal128(7, 3)), ("b", pa.struct([("a", pa.int8())]))]),
            pa.struct([("a", pa.decimal128(7, 3))]),
            pa.struct([("a", pa.decimal128(7, 3)), ("b", pa.struct([("a", pa.int8())]))]),
        ),
        (pa.list_(pa.decimal128(7, 3)), pa.list_(pa.float64()), None),
        (pa.map_(pa.string(), pa.decimal128(5, 0)), pa.map_(pa.string(), pa.float32()), None),
        (STRUCT, pa.struct([("a", pa.string())]), None),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), STRUCT, None),
    ],
)
def test_common_type_of_two_types(one: pa.DataType, other: pa.DataType, both: pa.DataType | None) -> None:
    assert common(one, other) == both
    if not pa.types.is_struct(one):
        assert common(other, one) == both
    if both is not None:
        for kind in (one, other):
            assert pa.nulls(2, kind).cast(both).null_count == 2


LEAVES = st.sampled_from(
    [
        *(pa.int8(), pa.int16(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())),
        *(pa.null(), pa.bool_(), pa.binary(), pa.binary(3), pa.binary_view(), pa.decimal128(7, 3), pa.date32()),
        *(pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("ms", "Asia/Tokyo"), pa.duration("us")),
    ]
)
KINDS = st.recursive(
    LEAVES,
    lambda below: (
        below.map(lambda kind: pa.list_(pa.field("element", kind, metadata={"of": "file"})))
        | below.map(pa.large_list)
        | st.lists(below, min_size=1, max_size=3).map(lambda some: pa.struct(list(zip("abc", some, strict=False))))
    ),
    max_leaves=4,
)


@given(st.data(), KINDS, KINDS)
@settings(max_examples=120, deadline=None)
def test_every_value_is_unchanged_or_an_error_of_its_row(
    data: st.DataObject, one: pa.DataType, other: pa.DataType
) -> None:
    """Of both files; and a schema does not hang on which column of the two is whose."""
    schemas = {"a": pa.schema([("x", one)]), "b": pa.schema([pa.field("x", other, metadata={"k": "v"})])}
    both = common(plain(one), plain(other))
    if both is None:
        assert common(plain(other), plain(one)) is None
        with pytest.raises(ValueError, match=r"^b: column 'x' is ") as caught:
            one_schema(["x"], schemas)
        assert "\n" not in str(caught.value)
        return
    schema = one_schema(["x"], schemas)
    for kind in (one, other):
        values = data.draw(st.lists(values_of(plain(kind), usual=True), min_size=1, max_size=5))
        table = pa.table({"x": pa.array(values, kind)})
        table = pa.concat_tables([table.slice(0, 2), table.slice(2)])
        done, errors = split_errors(conform(table, schema))
        assert done.schema.equals(schema, check_metadata=True)
        given_back, expected = done["x"].to_pylist(), table["x"].to_pylist()
        for row, error in enumerate(errors):
            assert given_back[row] is None if error is not None else holds(given_back[row], expected[row])
        inexact = any(word in str(schema) for word in ("double", "int64"))
        assert inexact or not any(errors)


def holds(now: Any, before: Any) -> bool:
    """Equal, but for members of a struct that its file did not have: those are null."""
    if isinstance(before, dict):
        return all(holds(value, before.get(name)) for name, value in now.items()) and set(before) <= set(now)
    if isinstance(before, list):
        return len(now) == len(before) and all(holds(*pair) for pair in zip(now, before, strict=True))
    return bool(now == before)


def test_a_value_that_does_not_fit_fails_only_its_row() -> None:
    schema = one_schema(["n"], {"a": pa.schema([("n", pa.int64())]), "b": pa.schema([("n", pa.float64())])})
    numbers = [1, 2**53 + 1, None, -(2**53)]
    done, errors = split_errors(conform(pa.table({"n": numbers}), schema))
    assert done["n"].to_pylist() == [1.0, None, None, -(2.0**53)]
    assert [error is None for error in errors] == [True, False, True, True]
    assert str(errors[1]).startswith("column n: Integer value 9007199254740993 not in range")
    far = pa.table({"t": pa.array([0, 2**50], pa.timestamp("ms"))})
    done, errors = split_errors(conform(far, pa.schema([("t", pa.timestamp("ns"))])))
    assert done["t"].null_count == 1 and str(errors[1]).startswith("column t: Casting from timestamp[ms]")


@pytest.mark.parametrize("kind", TEXTS, ids=str)
@pytest.mark.parametrize("into", [pa.string(), pa.large_string()], ids=str)
def test_text_that_is_not_utf8_is_a_row_error(kind: pa.DataType, into: pa.DataType) -> None:
    table = pa.table({"n": [1, 2, 3], "x": bad_text(kind)})
    table = pa.concat_tables([table, table.slice(1)])
    done, errors = split_errors(conform(table, pa.schema([("x", into)])))
    assert done["x"].to_pylist() == ["good", "\ufffd" * 3, "fine", "\ufffd" * 3, "fine"]
    assert errors == [None, "column x: not UTF-8", None, "column x: not UTF-8", None]
    assert done.column_names == ["x"] and done.schema.field("x").type == into


@pytest.mark.parametrize("kind", TEXTS, ids=str)
def test_nested_text_that_is_not_utf8_is_null(kind: pa.DataType) -> None:
    """In a list cut in two, as shards cut them, in a struct and in a map."""
    text = bad_text(kind)
    columns = {
        "l": pa.ListArray.from_arrays([0, 1, 2, 3], text),
        "s": pa.StructArray.from_arrays([text], ["text"]),
        "m": pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "c"]), text),
    }
    good = {"l": (["good"], ["fine"]), "s": ({"text": "good"}, {"text": "fine"})}
    good["m"] = ([("a", "good")], [("c", "fine")])
    for name, values in columns.items():
        whole = pa.table({name: values})
        schema = one_schema([name], {"a": whole.schema})
        for table in (whole, pa.concat_tables([whole.slice(0, 1), whole.slice(1)])):
            done, errors = split_errors(conform(table, schema))
            assert done[name].to_pylist() == [good[name][0], None, good[name][1]]
            assert [error is None for error in errors] == [True, False, True]
            assert f"column {name}: " in str(errors[1]) and "\n" not in str(errors[1])


def test_the_error_names_the_first_bad_column() -> None:
    table = pa.table({"x": bad_text(), "n": [1, 2**60 + 1, 2**60 + 1]})
    schema = pa.schema([("x", pa.string()), ("n", pa.float64())])
    errors = conform(table, schema)[ERROR].to_pylist()
    assert errors[:2] == [None, "column x: not UTF-8"] and str(errors[2]).startswith("column n: ")


def test_metadata_of_files_is_dropped() -> None:
    """Neither metadata, nor what may be null, nor names below a list, nor dictionaries and extensions."""
    element = pa.field("element", pa.dictionary(pa.int8(), pa.string()), nullable=False, metadata={"c": "d"})
    files = {
        "a": pa.schema(
            [
                pa.field("l", pa.list_(element), nullable=False, metadata={"PARQUET:field_id": "3"}),
                pa.field("u", pa.uuid()),
                pa.field("j", pa.json_(pa.string())),
                pa.field("n", pa.null()),
            ],
            metadata={"pandas": "{}"},
        ),
        "b": pa.schema([("n", pa.null()), ("j", pa.string()), ("l", pa.list_(pa.string())), ("u", pa.binary(16))]),
    }
    schema = one_schema(["l", "u", "j", "n"], files)
    expected = [("l", pa.list_(pa.string())), ("u", pa.binary(16)), ("j", pa.string())]
    expected.append(pa.field("n", pa.string(), metadata=UNTYPED))
    assert schema.equals(pa.schema(expected), check_metadata=True)
    assert schema.serialize() == one_schema(["l", "u", "j", "n"], dict(reversed(files.items()))).serialize()
    table = files["a"].empty_table()
    assert conform(table, schema).schema.remove(4).equals(schema, check_metadata=True)


def test_columns_without_a_common_type_are_refused_in_one_line() -> None:
    def refusal(*kinds: pa.DataType) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            one_schema(["x"], {f"{place}.parquet": pa.schema([("x", kind)]) for place, kind in enumerate(kinds)})
        assert "\n" not in str(caught.value)
        return str(caught.value)

    said = refusal(pa.null(), pa.int32(), pa.int64(), pa.int8(), pa.string())
    assert said == "4.parquet: column 'x' is string, but int64 in 2.parquet; convert one of them"
    assert refusal(STRUCT, pa.list_(STRUCT)).startswith("1.parquet: column 'x' is list<")
    said = refusal(pa.struct([]))
    assert said == "0.parquet: column 'x' is struct<>, which cannot be read and written as struct<>; convert the column"
    with pytest.raises(ValueError, match=r"^a: column 'x' occurs 2 times; rename all but one$"):
        one_schema(["x"], {"a": pa.schema([("x", pa.int8()), ("y", pa.int8()), ("x", pa.int8())])})
    with pytest.raises(ValueError, match=r"^a: no column 'x'; it has y$"):
        one_schema(["x"], {"a": pa.schema([("y", pa.int8())])})


def test_a_null_of_an_empty_dictionary_stays_null() -> None:
    words = pa.dictionary(pa.int8(), pa.string())
    table = pa.table({"x": pa.array([None], pa.struct([("a", words)]))})
    found = conform(table, pa.schema([("x", pa.struct([("a", pa.string())]))]))
    assert found["x"].to_pylist() == [None] and found[ERROR].to_pylist() == [None]
