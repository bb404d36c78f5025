"""Checks that every node sees the same files in a local checkpoint folder as the driver."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from actors.engine.errors import UserError
from actors.engine.model.file_digests import WEIGHTS, answer_files, file_digest

SAMPLE_BYTES = 2**20  # bytes hashed at the start (with the header) and at the end of a weights file


@dataclass(frozen=True)
class PinnedFolder:
    """A local folder as the driver saw it. samples: (file name, "size:digest"), with a digest as in `_sample`."""

    path: str
    samples: tuple[tuple[str, str], ...]


def pin(folder: Path) -> PinnedFolder:
    """Return the folder with the size and a digest of every file, for `check_same` on other nodes."""
    return PinnedFolder(str(folder.resolve()), tuple((path.name, _sample(path)) for path in answer_files(folder)))


def check_same(pinned: PinnedFolder, *, weights: bool) -> Path:
    """Return the folder if this node sees the same files in it as the driver.

    Small files are compared whole; weights only if `weights` is set, by their size, start and end. Raises UserError
    that names the host and the first file that differs.
    """
    folder = Path(pinned.path)
    for name, sample in pinned.samples:
        path = folder / name
        if weights or path.suffix != WEIGHTS:
            problem = "differs from" if path.is_file() else "is missing, unlike"
            if not path.is_file() or _sample(path) != sample:
                raise UserError(
                    f"{path}: {problem} the file where the job was planned (this host: {socket.gethostname()}); give "
                    "every node the same files, or take a checkpoint in s3:// or on the hub"
                )
    return folder


def _sample(path: Path) -> str:
    size = path.stat().st_size
    if path.suffix != WEIGHTS or size <= 2 * SAMPLE_BYTES:
        return f"{size}:{file_digest(path, 'sha256')}"
    with open(path, "rb") as file:
        ends = file.read(SAMPLE_BYTES) + os.pread(file.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES)
    return f"{size}:{hashlib.sha256(ends).hexdigest()}"
