"""Checks a local output folder of `adapt`, and replaces files whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from actors.engine.errors import UserError
from pipeline.storage.working_dir import check_outlives_job


def local_path(key: str, place: str) -> Path:
    """Return the path of a local output folder. key: config key that sets the folder.

    Raises UserError for a URL, and for a folder that Ray deletes after the job.
    """
    if "://" in place:
        raise UserError(f"{key}: {place} is not local; name a local folder, and copy the results afterwards")
    check_outlives_job(key, place)
    return Path(place)


def check_apart(key: str, folder: Path, others: Mapping[str, Iterable[Path | str]]) -> None:
    """Raise UserError if `folder` equals, contains or is inside a path in `others`. Symbolic links are resolved.

    Args:
        key: config key that sets the folder.
        others: config key of an input or model -> its local paths.
    """
    output = folder.resolve()
    for other, paths in others.items():
        for path in paths:
            theirs = Path(path).resolve()
            if output.is_relative_to(theirs) or theirs.is_relative_to(output):
                raise UserError(f"{key}: {folder} and {other} {path} overlap; choose another folder")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. After the block, that file replaces `path`; after an error, it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
