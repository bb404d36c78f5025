"""Whether a job can write to its output folder: checked before anything starts. Only local folders need it."""

from __future__ import annotations

import errno
import os
import uuid

from actors.engine.errors import UserError
from pipeline.storage.folder import Folder, LocalFolder

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # failures of the disk, not of the path


def check_location(folder: Folder) -> None:
    """Raise UserError if a file lies where the folder should be, or the user may not write there. Writes nothing."""
    if not isinstance(folder, LocalFolder):
        return
    path = folder.path
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise UserError(f"output.path: {path} is a file; give a folder")
    if path != folder.path and not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"output.path: {folder.path} cannot be made: {path} is not writable")


def make_writable(folder: Folder) -> None:
    """Make the folder, and try the two operations that commits need: new files and hard links.

    Raises UserError if the folder or its file system does not allow them.
    """
    if not isinstance(folder, LocalFolder):
        return
    temporary = folder.path / "_job" / "tmp"
    probe = temporary / f"probe-{uuid.uuid4().hex}"
    linked = probe.with_suffix(".linked")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"output.path: {folder.path} cannot be written: {error.strerror}") from None
    try:
        os.link(probe, linked)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"output.path: the file system of {folder.path} has no hard links ({error.strerror}), which commits need; "
            "choose a local disk, NFS or s3://"
        ) from None
    finally:
        probe.unlink()
        linked.unlink(missing_ok=True)
