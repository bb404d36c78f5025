"""Values of Arrow types, for property tests."""

from __future__ import annotations

import decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["../../etc", "{{ 7*7 }}", "\0", "{}", "[]", '{"seed": 1}', '{"temperature": 1e999}', "[" * 2000]),
)


def values_of(kind: pa.DataType, *, usual: bool = False) -> st.SearchStrategy[Any]:
    """Return values of a type, null among them. usual: no NaN or infinity (JSON has none), no time beyond Python's."""
    found: st.SearchStrategy[Any] = st.none()
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        found = st.integers(-(2 ** (bits - 1)) if signed else 0, 2 ** (bits - signed) - 1) | st.integers(0, 100)
    elif pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_floating(kind):
        found = st.floats(width=kind.bit_width, allow_nan=not usual, allow_infinity=not usual)
    elif pa.types.is_decimal(kind):
        found = (
            st.integers(-99, 99).map(decimal.Decimal)
            if kind.precision - kind.scale > 1
            else st.just(decimal.Decimal(1))
        )
    elif pa.types.is_fixed_size_binary(kind):
        found = st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        found = st.binary(max_size=6)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        found = TEXTS
    elif pa.types.is_date(kind):
        found = st.dates()
    elif pa.types.is_time(kind):
        found = st.times().map(lambda time: time.replace(microsecond=0))
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        far = 10**9 if usual else 2**62
        found = st.integers(-far, far) | st.integers(0, 10**9)
    elif pa.types.is_map(kind):
        found = st.lists(
            st.tuples(st.text("abc", min_size=1, max_size=2), values_of(kind.item_type, usual=usual)), max_size=2
        )
    elif pa.types.is_struct(kind):
        found = st.fixed_dictionaries({child.name: values_of(child.type, usual=usual) for child in kind})
    elif pa.types.is_fixed_size_list(kind):
        found = st.lists(values_of(kind.value_type, usual=usual), min_size=2, max_size=2)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        found = st.lists(values_of(kind.value_type, usual=usual), max_size=3)
    return st.none() | found
