"""Counts labels and kinds of errors in a shard's rows, for its statistics."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pyarrow as pa

KINDS = 3  # kinds of errors that a shard names; the rest is counted
MOST_LABELS = 256  # distinct labels counted in a shard, at most
KIND_CHARS, EXAMPLE_CHARS, ID_CHARS = 160, 300, 80
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{16,}\b|\d[\d,.]*\d|\d")


def label_counts(part: pa.Table) -> str:
    """Return JSON of {label: answers}, the most frequent first; "" for a job without choices, or for too many labels.

    Rows with labels of their own may have more than `MOST_LABELS`.
    """
    if "choice_probability" not in part.column_names:
        return ""
    counts = Counter(part["generated_text"].filter(part["choice_probability"].is_valid()).to_pylist())
    return json.dumps(dict(counts.most_common())) if 0 < len(counts) <= MOST_LABELS else ""


def kind_of(error: str) -> str:
    """Return an error without the parts that differ by row: quoted text, numbers, digests."""
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
