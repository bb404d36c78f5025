"""Checks that every node sees the same files of a local checkpoint as the driver."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from actors.engine.errors import UserError
from actors.engine.model.file_digests import WEIGHTS, answer_files, file_digest

SAMPLE_BYTES = 2**20  # bytes hashed at each end of a weights file; the header is in the first ones


@dataclass(frozen=True)
class PinnedFolder:
    """A local folder as the driver saw it. samples: (file name, "size:SHA-256 of the content or its ends")."""

    path: str
    samples: tuple[tuple[str, str], ...]


def pin(folder: Path) -> PinnedFolder:
    """Return the folder with a sample of every file, for `check_same` on other nodes."""
    return PinnedFolder(str(folder.resolve()), tuple((path.name, _sample(path)) for path in answer_files(folder)))


def check_same(pinned: PinnedFolder, *, weights: bool) -> Path:
    """Return the folder if this node sees the same files in it as the driver.

    Small files are compared whole. Weights, if `weights` is set, are compared by their size and both ends. Raises
    UserError that names the host and the first file that differs.
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


def _sample(path: Path) -> str:
    size = path.stat().st_size
    if path.suffix != WEIGHTS or size <= 2 * SAMPLE_BYTES:
        return f"{size}:{file_digest(path, 'sha256')}"
    with open(path, "rb") as file:
        ends = file.read(SAMPLE_BYTES) + os.pread(file.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES)
    return f"{size}:{hashlib.sha256(ends).hexdigest()}"
