"""Histograms count every value once, in bins that can be read back; errors alike but for numbers are one kind."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.generate.distributions import (
    EXACT,
    KINDS,
    PER_OCTAVE,
    bins_of,
    depth_histogram,
    error_kinds,
    histogram,
    kind_of,
)

VALUES = st.integers(0, 2**24)


def first_values(bins: int) -> np.ndarray:
    """The least value of each of the first `bins` bins, which is one more than the largest of the bin before."""
    place = np.arange(bins)
    octave, within = np.divmod(np.maximum(place - EXACT, 0), PER_OCTAVE)
    return np.where(place < EXACT, place, (PER_OCTAVE + within) << (octave + 1))


@given(VALUES)
@settings(deadline=None, max_examples=40)
def test_a_bin_holds_its_values(value: int) -> None:
    place = int(bins_of(np.array([value]))[0])
    first, end = first_values(place + 2)[-2:].tolist()
    assert first <= value < end
    assert end - first <= max(1, first / 8) and (value >= EXACT or first == value)


@given(st.lists(VALUES, max_size=20))
@settings(deadline=None, max_examples=40)
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    counts = histogram(values)
    assert counts == [] or counts[-1] > 0
    assert {place: count for place, count in enumerate(counts) if count} == Counter(
        bins_of(np.array(values, int)).tolist()
    )


def test_depths_are_counted_by_the_layer() -> None:
    assert depth_histogram([2.0, None, 2.9, 4.0]) == [0, 0, 2, 0, 1]
    assert depth_histogram([None]) == []


def test_numbers_and_quoted_texts_do_not_make_another_kind() -> None:
    assert kind_of("prompt of 9,003 tokens leaves no room in a context of 512") == kind_of(
        "prompt of 7 tokens leaves no room in a context of 4096"
    )
    assert kind_of("label 'a' twice") == kind_of("label 'b' twice") != kind_of("label twice")


def test_the_most_frequent_kinds_are_named_and_the_rest_counted() -> None:
    errors = ["a 1", "a 2", None, "b", "b", "b", "c", "c", "d", "e"]
    part = pa.table({"id": [f"row-{place}" for place in range(len(errors))], "error": errors})
    kinds = json.loads(error_kinds(part))
    assert kinds == [
        ["b", 3, "row-3", "b"],
        ["a …", 2, "row-0", "a 1"],
        ["c", 2, "row-6", "c"],
        ["", 2, "", ""],
    ]
    assert len(kinds) == KINDS + 1
    assert error_kinds(part.slice(2, 1)) == ""
