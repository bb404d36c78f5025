"""Distributions over a shard's rows, small enough for its statistics: histograms, labels, kinds of errors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

EXACT = 16  # values below it have a bin each; above, eight bins an octave
PER_OCTAVE = 8
KINDS = 3  # of errors that a shard names; the rest is counted
MOST_LABELS = 256  # that a shard counts
KIND_CHARS, EXAMPLE_CHARS, ID_CHARS = 160, 300, 80
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{16,}\b|\d[\d,.]*\d|\d")


def bins_of(values: np.ndarray) -> np.ndarray:
    """Return the bin of each value; values are integers of at least 0."""
    octaves = np.floor(np.log2(np.maximum(values, EXACT))).astype(np.int64)
    within = (values >> (octaves - 3)) - PER_OCTAVE
    return np.where(values < EXACT, values, EXACT + (octaves - 4) * PER_OCTAVE + within)


def histogram(values: Sequence[int]) -> list[int]:
    """Count the values in each bin; bins after the last value are left out."""
    counts: list[int] = np.bincount(bins_of(np.array(values, dtype=np.int64))).tolist()
    return counts


def depth_histogram(depths: Sequence[float | None]) -> list[int]:
    """Count the mean depths between d and d + 1 layers, for d = 0, 1, ...; null ones are left out."""
    known = [int(depth) for depth in depths if depth is not None]
    counts: list[int] = np.bincount(np.array(known, dtype=np.int64)).tolist()
    return counts


def label_counts(part: pa.Table) -> str:
    """Return JSON of {label: answers}, the most frequent first; "" for a job without choices, or for too many labels.

    Rows with labels of their own may have more than `MOST_LABELS`.
    """
    if "choice_probability" not in part.column_names:
        return ""
    counts = Counter(part["generated_text"].filter(part["choice_probability"].is_valid()).to_pylist())
    return json.dumps(dict(counts.most_common())) if 0 < len(counts) <= MOST_LABELS else ""


def kind_of(error: str) -> str:
    """Return an error without what differs by row: quoted text, numbers, digests."""
    return _VARIABLE.sub("…", error[:EXAMPLE_CHARS])[:KIND_CHARS]


def id_value(row_id: pa.Scalar) -> Any:
    """Return an id as Python's value; "?" for one that Python cannot hold, such as a date after the year 9999."""
    try:
        return row_id.as_py()
    except (ValueError, OverflowError):
        return "?"


def error_kinds(part: pa.Table) -> str:
    """Return JSON of [kind, answers, id, error]: the `KINDS` most frequent kinds with their first example.

    A last entry with empty texts counts all other kinds. "" if there is no error.
    """
    bad = part.select(["id", "error"]).filter(part["error"].is_valid())
    errors = bad["error"].to_pylist()
    kinds = [kind_of(error) for error in errors]
    listed: list[list[str | int]] = []
    for kind, count in Counter(kinds).most_common(KINDS):
        place = kinds.index(kind)
        listed.append([kind, count, str(id_value(bad["id"][place]))[:ID_CHARS], errors[place][:EXAMPLE_CHARS]])
    rest = len(kinds) - sum(int(count) for _, count, *_ in listed)
    return json.dumps([*listed, ["", rest, "", ""]] if rest else listed) if listed else ""
