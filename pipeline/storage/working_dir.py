"""Handles files in the working directory of a Ray job: the folder that `ray job submit --working-dir` has uploaded.

Each node unpacks the upload into a folder of its own. The folder's name changes with any file in it, and Ray deletes
the folder after the job. So a command must not write there, and an input file there is identified by its path below the
folder (URL `working-dir://./PATH`) and by its content.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from actors.engine.errors import UserError

URL = "working-dir://."
UNPACKED = re.compile(r"(.*/runtime_resources/working_dir_files/[^/]+)(/|$)")  # Ray 2.60 unpacks uploads to such paths


@cache
def _found(paths: tuple[str, ...]) -> str | None:
    return next((found[1] for path in paths if (found := UNPACKED.match(os.path.realpath(path)))), None)


def working_dir() -> str | None:
    """Return the working directory of this process's Ray job; None in other processes."""
    # Ray puts the folder on PYTHONPATH and starts processes in it; an entry point may change one of the two
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    with suppress(FileNotFoundError):  # the current folder was removed
        paths.append(os.getcwd())
    return _found(tuple(paths))


def portable(path: str) -> str:
    """Return the URL of an absolute path in the working directory, the same on all nodes. Return other paths as is."""
    folder = working_dir()
    if folder is None or not f"{path}/".startswith(f"{folder}/"):
        return path
    return f"{URL}{path[len(folder) :]}"


def unpacked(url: str) -> str:
    """Return the path on this node of a URL that `portable` made. Return other paths as is.

    Raises UserError outside of a submitted job.
    """
    if not url.startswith(URL):
        return url
    folder = working_dir()
    if folder is None:
        raise UserError(f"{url}: is in the folder that `ray job submit --working-dir` uploaded; submit the job again")
    return os.path.normpath(f"{folder}{url.removeprefix(URL)}")


def local_version(path: str, status: os.stat_result) -> str:
    """Return a text that changes with the content of a local file: its modification time in ns since 1970.

    In the working directory, where each submit gives files new times: the SHA-256 of the file. status: of the file.
    """
    if portable(path) == path:
        return str(status.st_mtime_ns)
    return _sha256(path, status.st_size, status.st_mtime_ns)


@cache
def _sha256(path: str, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_outlives_job(key: str, place: str | Path) -> None:
    """Raise UserError if an output is in a folder that Ray has unpacked. key: what sets the output. Follow links."""
    path = str(place).removeprefix("file://")
    if path.startswith(URL) or ("://" not in path and UNPACKED.match(os.path.realpath(path))):
        raise UserError(
            f"{key}: {place} is in the temporary copy that `ray job submit` made of your folder, and Ray deletes it: "
            f"give an absolute path on a disk that all nodes share{', or s3://' if key == 'output.path' else ''}"
        )
