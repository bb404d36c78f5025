"""A checkpoint in a folder that every node sees: digests of its files, and the check that a node sees the same files.

Digests of weights are cached by size, modification time and inode, so that a job over 100 GB is planned in seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from actors.engine.errors import UserError

CACHE_VARIABLE, CACHE = "SKIPDECODE_CACHE", "~/.cache/skipdecode"
SMALL = (".json", ".jinja", ".model", ".txt")  # endings of the files other than weights that can change an answer
WEIGHTS = ".safetensors"
SETTLED_NS = 2 * 10**9  # a file changed less than this ago may change again within one tick of its clock
SAMPLE_BYTES = 2**20  # at both ends of a weights file, the header included


@dataclass(frozen=True)
class PinnedFolder:
    """A local folder as the driver saw it. samples: (name, sample of its content) of every file."""

    path: str
    samples: tuple[tuple[str, str], ...]


def cache_root(folder: str | None) -> Path:
    """The cache of this machine: `folder`, else $SKIPDECODE_CACHE, else ~/.cache/skipdecode."""
    return Path(folder or os.environ.get(CACHE_VARIABLE) or CACHE).expanduser()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a local checkpoint that can change an answer, by name."""
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    record = cache_root(None) / "digests" / f"{key}.json"
    known = _read(record)
    kept: dict[str, list[int | str]] = {}
    found: dict[str, str] = {}
    for path in _files(folder):
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
        _write(record, kept)
    return found


def pin(folder: Path) -> PinnedFolder:
    """The folder with a sample of every file, for `check_same` on other nodes."""
    return PinnedFolder(str(folder.resolve()), tuple((path.name, _sample(path)) for path in _files(folder)))


def check_same(pinned: PinnedFolder, *, weights: bool) -> Path:
    """The folder, if this node sees the files that the driver pinned.

    Small files are compared whole; weights, if asked for, by their size, header, and both ends. Raises UserError that
    names the host and the first file that differs.
    """
    folder = Path(pinned.path)
    for name, sample in pinned.samples:
        path = folder / name
        if weights or path.suffix != WEIGHTS:
            problem = "differs from" if path.is_file() else "is missing, unlike"
            if not path.is_file() or _sample(path) != sample:
                raise UserError(
                    f"{path}: {problem} the file where the job was planned, on host {socket.gethostname()}; give every "
                    "node the same files, or a checkpoint in s3:// or on the hub"
                )
    return folder


def file_digest(path: Path, algorithm: str) -> str:
    """Hexadecimal digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if path.suffix in (*SMALL, WEIGHTS) and path.is_file())


def _sample(path: Path) -> str:
    size = path.stat().st_size
    if path.suffix != WEIGHTS or size <= 2 * SAMPLE_BYTES:
        return f"{size}:{file_digest(path, 'sha256')}"
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(SAMPLE_BYTES))
        header = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        digest.update(os.pread(file.fileno(), min(header, size), 8))
        digest.update(os.pread(file.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES))
    return f"{size}:{digest.hexdigest()}"


def _read(record: Path) -> dict[str, list[int | str]]:
    try:
        values = json.loads(record.read_text())
        return {str(name): list(entry) for name, entry in values.items() if len(entry) == 4}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}


def _write(record: Path, entries: dict[str, list[int | str]]) -> None:
    """Write the record, or nothing where the cache cannot be written."""
    temporary = record.with_suffix(f".{uuid4().hex}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entries))
        temporary.replace(record)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
