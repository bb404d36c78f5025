"""The value of a job file's key `output_format`, and of `input.output_format`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from actors.engine.constraints.output_format import KINDS, OutputFormat
from actors.engine.errors import UserError, flat
from pipeline.messages import where_sought

_FILES = {"json_schema": ".json", "grammar": ".lark"}


def _form(value: Any) -> Any:
    """The form of `{json_schema: …}`, `{regex: …}` or `{grammar: …}`; a .json or .lark file may hold it."""
    if not isinstance(value, dict):
        return value
    read = dict(value)
    for kind, ending in _FILES.items():
        text = read.get(kind)
        if isinstance(text, str) and text.endswith(ending) and "\n" not in text:
            try:
                read[kind] = Path(text).read_text()
            except FileNotFoundError:
                raise UserError(f"{text}: no such file{where_sought(text)}") from None
            except (OSError, ValueError) as error:
                raise UserError(f"{text}: cannot be read: {flat(error)}") from None
    form = OutputFormat.of(read)
    form.check()
    return form


def _column(value: Any) -> Any:
    if isinstance(value, dict) and not (len(value) == 1 and set(value) <= set(KINDS)):
        raise UserError(f"must be {{form: column}} with one of {', '.join(KINDS)}")
    return value


Form = Annotated[OutputFormat, BeforeValidator(_form), PlainSerializer(lambda form: form.to_dict(), return_type=dict)]
FormColumn = Annotated[dict[str, str], BeforeValidator(_column)]
