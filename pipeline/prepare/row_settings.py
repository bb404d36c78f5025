"""Reads the settings of single rows: from columns, or from the request in a row of an OpenAI batch file.

Format of batch files: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from actors.engine.errors import UserError, flat
from actors.engine.types import SamplingParams, effective
from actors.openai_requests import CompletionRequest, read_request
from pipeline.messages import is_unicode, one_line

BATCH_COLUMNS = ("custom_id", "method", "url", "body")


def from_json(text: str, name: str) -> Any:
    """Parse a JSON text. Raises UserError if it is not JSON. name: name of the text in the error message."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON: {one_line(error)}") from None


def read_batch_row(values: Mapping[str, Any]) -> CompletionRequest:
    """Return the request in a row of an OpenAI batch file. Raises UserError if the request is wrong."""
    for name in BATCH_COLUMNS:
        if values[name] is None:
            raise UserError(f"{name} is missing")
    if values["method"] != "POST":
        raise UserError(f"method is {values['method']!r}; it must be POST")
    body = from_json(values["body"], "body")
    if not isinstance(body, dict):
        raise UserError(f"body is a {type(body).__name__}; it must be an object")
    return read_request(values["url"], body)


def column_overrides(values: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the sampling parameters in a row's columns. columns: parameter -> column.

    A text, as all cells of a CSV file are, becomes the number or truth value that it spells, and an empty text null.
    """
    return {name: _spelled(name, values[column]) for name, column in columns.items()}


def _spelled(name: str, value: Any) -> Any:
    if not isinstance(value, str) or (name == "stop" and value):
        return value
    if value.lower() in ("", "true", "false") or (name == "ignore_eos" and value in ("0", "1")):
        return value.lower() in ("true", "1") if value else None
    for number in (int, float):
        with suppress(ValueError):
            return number(value)
    return value


def own_sampling(base: SamplingParams, changes: Mapping[str, Any]) -> tuple[SamplingParams, str | None]:
    """Return a row's sampling parameters: `base` (the job's) with the row's `changes`, and the changes alone as JSON.

    The JSON is None if nothing changes; its keys are sorted. Raises UserError for unknown names or impossible values.
    """
    own = effective(changes)
    if not own:
        return base, None
    try:
        merged = base.merged(own)
    except (ValueError, OverflowError) as error:
        raise UserError(f"sampling: {flat(error)}") from None
    if not all(map(is_unicode, merged.stop)):
        raise UserError("sampling: stop is not valid Unicode")
    values = {name: getattr(merged, name) for name in own}
    return merged, json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
