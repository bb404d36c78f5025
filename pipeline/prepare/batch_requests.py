"""Rows of an OpenAI batch file: `custom_id`, `method`, `url`, and `body`, as JSON.

Source: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actors.engine.errors import UserError
from actors.openai_requests import CompletionRequest, read_request
from pipeline.messages import one_line

COLUMNS = ("custom_id", "method", "url", "body")


def read_batch_row(values: Mapping[str, Any]) -> CompletionRequest:
    """The request of a row. Raises UserError with the row's error."""
    for name in COLUMNS:
        if values[name] is None:
            raise UserError(f"{name} is missing")
    if values["method"] != "POST":
        raise UserError(f"method is {values['method']!r}; it must be POST")
    try:
        body = json.loads(values["body"])
    except (ValueError, RecursionError) as error:
        raise UserError(f"body: not JSON: {one_line(error)}") from None
    if not isinstance(body, dict):
        raise UserError(f"body is a {type(body).__name__}; it must be an object")
    return read_request(values["url"], body)
