"""Reads a checkpoint's JSON files, and computes the SHA-256 digests of its files.

Digests of weight files are cached, so that a checkpoint of 100 GB is read only once per machine. A cached digest is
valid as long as the file's size, modification time and inode are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from actors.engine.errors import UserError

CACHE_VARIABLE, CACHE = "SKIPDECODE_CACHE", "~/.cache/skipdecode"
SMALL = (".json", ".jinja", ".model", ".txt")  # suffixes of files (other than weights) that can change an answer
WEIGHTS = ".safetensors"
SETTLED_NS = 2 * 10**9  # nanoseconds; a file changed more recently may still be changing: its digest is not cached


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError if the file holds anything else."""
    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise UserError(f"{path}: JSON is nested too deeply for a checkpoint's file") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object, but {type(values).__name__}")
    return values


def cache_root(folder: str | None) -> Path:
    """Return the cache folder: `folder` if given, else $SKIPDECODE_CACHE if set, else ~/.cache/skipdecode.

    Raises UserError if the folder begins with ~ and there is no home folder.
    """
    path = Path(folder or os.environ.get(CACHE_VARIABLE) or CACHE)
    try:
        return path.expanduser()
    except RuntimeError:
        raise UserError(f"{path}: no home folder is known; set HOME, or {CACHE_VARIABLE} to a folder") from None


def cache_record(cache: str | None, kind: str, values: Any) -> Path:
    """Return the cache file of a record. values: JSON values that identify the record. kind: subfolder of the cache."""
    key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
    return cache_root(cache) / kind / f"{key}.json"


def digests(folder: Path) -> dict[str, str]:
    """Return file name -> SHA-256 for every file in a checkpoint folder that can change an answer."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    record = cache_root(None) / "digests" / f"{key}.json"
    known = _read(record)
    kept: dict[str, list[int | str]] = {}
    found: dict[str, str] = {}
    for path in answer_files(folder):
        if path.suffix != WEIGHTS:
            found[path.name] = file_digest(path, "sha256")
            continue
        status = path.stat()
        state: list[int | str] = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = known.get(path.name, [])
        found[path.name] = str(entry[3]) if entry[:3] == state else file_digest(path, "sha256")
        if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
            kept[path.name] = [*state, found[path.name]]
    if kept != known:
        write_record(record, kept)
    return found


def weights_digest(files: Mapping[str, str]) -> str:
    """Return one digest of all weights of a model. files: name of each safetensors file -> its SHA-256."""
    return hashlib.sha256("\n".join(f"{name} {files[name]}" for name in sorted(files)).encode()).hexdigest()


def file_digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def answer_files(folder: Path) -> Iterator[Path]:
    """Return the files in a checkpoint folder that can change an answer, sorted by name."""
    return (path for path in sorted(folder.iterdir()) if path.suffix in (*SMALL, WEIGHTS) and path.is_file())


def _read(record: Path) -> dict[str, list[int | str]]:
    try:
        values = json.loads(record.read_text())
        return {str(name): list(entry) for name, entry in values.items() if len(entry) == 4}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}


def write_record(record: Path, values: Mapping[str, Any]) -> None:
    """Write a record to the cache, atomically. Do nothing if the cache is not writable."""
    temporary = record.with_suffix(f".{uuid4().hex}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values))
        temporary.replace(record)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
