"""Labels of a job file or a row: reading and checking, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, flat
from pipeline.messages import check_unicode, where_sought


def labels_given(value: Any) -> Any:
    """The value of a key `choices` as a tuple: labels, or the name of a JSON file with a list of labels.

    Raises UserError for a label that is not text, or a file that holds something else.
    """
    if isinstance(value, str) and value.endswith(".json"):
        file = value
        try:
            value = json.loads(Path(value).read_text())
            check_unicode(value, "label")
        except FileNotFoundError:
            raise UserError(f"{file}: no such file{where_sought(file)}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: cannot be read as JSON: {flat(error)}") from None
        if not isinstance(value, list):
            raise UserError(f"must hold one list of labels, not {type(value).__name__}")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        return value
    for label in value:
        if not isinstance(label, str):
            raise UserError(
                f"labels are text, and {label!r} is not; put it in quotes (true and false are YAML booleans)"
            )
    return tuple(value)


def normalized(label: str) -> str:
    """A label as exact match compares it: case and outer space ignored."""
    return label.strip().lower()


def check_labels(labels: Sequence[str | None], least: int = 1) -> None:
    """Raise UserError for fewer labels than `least`, or a label that is null, empty or repeated."""
    if not labels:
        raise UserError("choices is empty")
    if len(labels) < least:
        raise UserError(f"choices: {labels[0]!r} is the only label, so that it would be every answer; give two or more")
    seen = set()
    for index, label in enumerate(labels):
        if label is None or not label.strip():
            raise UserError(f"choices: label {index + 1} is {'null' if label is None else 'empty'}")
        if label in seen:
            raise UserError(f"choices: {label!r} is repeated")
        seen.add(label)
