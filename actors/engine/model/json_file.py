"""JSON files of a checkpoint: one object each, read with errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if the file holds anything else."""
    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise UserError(f"{path}: not JSON of a checkpoint: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object, but {type(values).__name__}")
    return values
