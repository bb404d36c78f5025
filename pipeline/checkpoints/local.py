"""Checks on each node that a local checkpoint folder holds the same files as on the driver."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from actors.engine.errors import UserError
from actors.engine.model.file_digests import WEIGHTS, answer_files, file_digest
from pipeline.storage.working_dir import portable, unpacked

SAMPLE_BYTES = 2**20  # bytes to hash at the start of a weights file, which holds its header, and at its end


@dataclass(frozen=True)
class PinnedFolder:
    """A local folder as the driver saw it.

    path: see `portable`. samples: pairs of file name and "size:digest" from `_sample`.
    """

    path: str
    samples: tuple[tuple[str, str], ...]


def pin(folder: Path) -> PinnedFolder:
    """Return size and digest of each file that affects answers, for `check_same` on other nodes."""
    samples = tuple((path.name, _sample(path)) for path in answer_files(folder))
    return PinnedFolder(portable(str(folder.resolve())), samples)


def check_same(pinned: PinnedFolder, *, weights: bool) -> Path:
    """Return the folder. Raises a UserError that names this host and the file if a file differs from the driver's.

    weights: compare weights files too, by size, start and end. Other files are compared whole.
    """
    folder = Path(unpacked(pinned.path))
    for name, sample in pinned.samples:
        path = folder / name
        if weights or path.suffix != WEIGHTS:
            problem = "the file differs from that" if path.is_file() else "the file is missing, but exists"
            if not path.is_file() or _sample(path) != sample:
                raise UserError(
                    f"{path}: {problem} on the host that planned the job (this is host {socket.gethostname()}); give "
                    "every node the same files, or use a checkpoint in s3:// or on the hub"
                )
    return folder


def _sample(path: Path) -> str:
    size = path.stat().st_size
    if path.suffix != WEIGHTS or size <= 2 * SAMPLE_BYTES:
        return f"{size}:{file_digest(path, 'sha256')}"
    with open(path, "rb") as file:
        ends = file.read(SAMPLE_BYTES) + os.pread(file.fileno(), SAMPLE_BYTES, size - SAMPLE_BYTES)
    return f"{size}:{hashlib.sha256(ends).hexdigest()}"
