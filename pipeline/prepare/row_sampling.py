"""A row's own sampling parameters: from one column (a struct, a map or JSON), or from a column per parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actors.engine.errors import UserError, flat
from actors.engine.types import SamplingParams
from pipeline.messages import is_unicode, one_line

_LARGEST = 2**31 - 1  # of integers, except the seed: fits into any tensor type


def read_overrides(value: Any) -> dict[str, Any]:
    """Parameters in a column's value: a struct, a map (pairs), or a JSON object; {} for null."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"sampling: not JSON: {one_line(error)}") from None
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(item, tuple) for item in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise UserError(f"sampling is a {type(value).__name__}; it must be an object")
    return {str(name): parameter for name, parameter in value.items()}


def own_sampling(base: SamplingParams, changes: Mapping[str, Any]) -> tuple[SamplingParams, str | None]:
    """The row's parameters, and the values that it overrides as canonical JSON, None without any.

    Raises UserError for unknown names and impossible values.
    """
    own = [name for name, value in changes.items() if value is not None]
    if not own:
        return base, None
    try:
        merged = base.merged(changes)
    except (ValueError, OverflowError) as error:
        raise UserError(f"sampling: {flat(error)}") from None
    values = {name: getattr(merged, name) for name in own}
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if name != "seed" and any(isinstance(number, int) and number > _LARGEST for number in numbers):
            raise UserError(f"sampling: {name} = {value!r}: must be at most {_LARGEST}")
    if not all(map(is_unicode, merged.stop)):
        raise UserError("sampling: stop is not valid Unicode")
    return merged, json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
