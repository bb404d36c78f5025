"""Reads and checks the answer formats of job files and rows: labels, JSON Schema, regex or grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from actors.engine.constraints.output_format import KINDS, OutputFormat
from actors.engine.errors import UserError, flat
from pipeline.config.base import place, text_of
from pipeline.messages import check_unicode

_FILES = {"json_schema": ".json", "grammar": ".lark"}


def labels_given(value: Any) -> Any:
    """Return the labels of a key `choices` as a tuple. value: labels, or the name of a .json file that lists them.

    Raises UserError if a label is not text, if the file cannot be read, or if it does not hold a list.
    """
    if isinstance(value, str) and value.endswith(".json"):
        file, text = value, text_of(place(value))
        try:
            value = json.loads(text)
            check_unicode(value, "label")
        except (ValueError, RecursionError) as error:
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
                f"labels must be text, but {label!r} is not; put it in quotes (true and false are YAML booleans)"
            )
    return tuple(value)


def normalized(label: str) -> str:
    """Strip and lower-case a label, so that labels can be compared."""
    return label.strip().lower()


def check_labels(labels: Sequence[str | None], least: int = 1) -> None:
    """Raise UserError if there are fewer than `least` labels, or if a label is null, empty or repeated."""
    if not labels:
        raise UserError("choices is empty")
    if len(labels) < least:
        raise UserError(f"choices: {labels[0]!r} is the only label, so it would be every answer; give two or more")
    seen = set[str]()
    for index, label in enumerate(labels):
        if label is None or not label.strip():
            raise UserError(f"choices: label {index + 1} is {'null' if label is None else 'empty'}")
        if label in seen:
            raise UserError(f"choices: {label!r} is repeated")
        seen.add(label)


def _form(value: Any) -> Any:
    """Check {json_schema: …}, {regex: …} or {grammar: …}, and return an OutputFormat. `…` may name a file."""
    if isinstance(value, OutputFormat):
        return value
    if not isinstance(value, dict):
        raise UserError("must be {json_schema: …}, {regex: …} or {grammar: …}")
    read = dict(value)
    for kind, ending in _FILES.items():
        text = read.get(kind)
        if isinstance(text, str) and text.endswith(ending) and "\n" not in text:
            read[kind] = text_of(place(text))
    form = OutputFormat.of(read)
    form.check()
    return form


def _column(value: Any) -> Any:
    if isinstance(value, dict) and not (len(value) == 1 and set(value) <= set(KINDS)):
        raise UserError(f"must be {{form: column}}, where form is one of {', '.join(KINDS)}")
    return value


Labels = Annotated[tuple[str, ...], BeforeValidator(labels_given), Field(min_length=1)]
Form = Annotated[OutputFormat, BeforeValidator(_form), PlainSerializer(lambda form: form.to_dict(), return_type=dict)]
FormColumn = Annotated[dict[str, str], BeforeValidator(_column)]
