"""What `skipdecode plan` predicted for a job, kept on this machine and then in the job's output.

<cache>/plans/<fingerprint>.json     written by `plan`, found by `run` and `report` on the same machine
_job/prediction.json                 its copy, written with the job's first report
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engine.model.file_digests import cache_record, write_record
from pipeline.storage.folder import Folder

PREDICTION = "_job/prediction.json"


def keep(cache: str | None, fingerprint: str, values: Mapping[str, Any]) -> None:
    """Keep what `plan --json` prints. cache: `model.cache` of the job."""
    write_record(_record(cache, fingerprint), {**values, "fingerprint": fingerprint, "made": time.time()})


def find(folder: Folder, cache: str | None, fingerprint: str) -> tuple[dict[str, Any] | None, bool]:
    """The prediction for a job, and whether its output holds it already."""
    try:
        stored = _valid(folder.read(PREDICTION), fingerprint)
    except FileNotFoundError:
        stored = None
    if stored is not None:
        return stored, True
    try:
        return _valid(_record(cache, fingerprint).read_bytes(), fingerprint), False
    except OSError:
        return None, False


def _record(cache: str | None, fingerprint: str) -> Path:
    return cache_record(cache, "plans", fingerprint)


def _valid(data: bytes, fingerprint: str) -> dict[str, Any] | None:
    """The values of a record; None if it is damaged or another job's."""
    try:
        values = json.loads(data)
        _, _ = values["chosen"]["seconds"], values["speeds"][0]["speed"]
        return values if values["fingerprint"] == fingerprint else None
    except (ValueError, LookupError, TypeError):
        return None
