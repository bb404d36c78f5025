"""Errors alike but for numbers are one kind."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.generate.stats import KINDS, error_kinds, kind_of


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
