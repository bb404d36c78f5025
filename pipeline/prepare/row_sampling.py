"""A row's own sampling parameters: from a struct, a map or JSON in one column, or from a column each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actors.engine.errors import UserError
from actors.engine.types import SamplingParams
from pipeline.messages import is_unicode, one_line

_LARGEST = 2**31 - 1  # of whole numbers but the seed: what fits into a tensor of any kind


def read_overrides(value: Any) -> dict[str, Any]:
    """One column's value as parameters: a struct, a map (pairs), or a JSON object; null: none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"sampling: not JSON: {one_line(error)}") from None
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(one, tuple) for one in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise UserError(f"sampling is a {type(value).__name__}; it must be an object")
    return {str(name): one for name, one in value.items()}


def own_sampling(base: SamplingParams, changes: Mapping[str, Any]) -> tuple[SamplingParams, str | None]:
    """What the row is answered with, and its own values as canonical JSON, None if it has none.

    ValueError, the row's error: unknown names, impossible values.
    """
    own = [name for name, value in changes.items() if value is not None]
    if not own:
        return base, None
    try:
        merged = base.merged(changes)
    except (ValueError, OverflowError) as error:
        raise UserError(f"sampling: {' '.join(str(error).split())}") from None
    values = {name: getattr(merged, name) for name in own}
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if name != "seed" and any(isinstance(one, int) and one > _LARGEST for one in numbers):
            raise UserError(f"sampling: {name} = {value!r}: must be at most {_LARGEST}")
    if not all(is_unicode(one) for one in merged.stop):
        raise UserError("sampling: stop is not valid Unicode")
    return merged, json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
