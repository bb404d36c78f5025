"""Checks that input files are not in the output folder, and have not changed since the job was planned."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from actors.engine.errors import UserError
from pipeline.config.job import RESULT_NAMES, JobConfig, StorageConfig
from pipeline.input.files import Files, InputFile, fixed_part
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import filesystem
from pipeline.storage.working_dir import unpacked

log = logging.getLogger(__name__)
DIGEST_BYTES = 4 * 2**30  # if local files are larger in total, only their modification times are compared
RUN_FOLDER = "2026-01-31T00-00-00Z"  # example name for the folder of an incremental run


def check_output_disjoint(
    config: JobConfig, listed: Collection[str] = (), key: str = "output.path", output: str = ""
) -> None:
    """Raise UserError if an output folder holds input files, or would be read as input. Links are followed.

    listed: URLs of the input files, if known. output: the output folder; default `output.path`. key: the job file's key
    that names the output folder, for messages.
    """
    shown = output or config.output.path
    folder = _real(shown, config.storage)
    real_folder = cache(lambda path: _real(path, config.storage))
    for url in listed:
        # the file that a link leads to may be in another folder
        place = os.path.realpath(url) if os.path.islink(url) else f"{real_folder(os.path.dirname(url))}/"
        if place.startswith(f"{folder}/"):
            raise UserError(f"{key}: {shown} holds the input file {url}; choose another folder")
    for given in config.input.path:
        path = _real(given, config.storage)
        if glob.has_magic(path) and not os.path.lexists(path):
            if any(re.match(glob_translate(path), f"{folder}/{name}") for name in _future_names(config)):
                raise UserError(f"{key}: the input glob {given} matches files in {shown}; choose another folder")
        elif path == folder or path.startswith(f"{folder}/"):
            raise UserError(f"{key}: {shown} holds the input {given}; choose another folder")
        elif folder.startswith(f"{path}/"):
            raise UserError(f"{key}: {shown} lies in the input folder {given}; choose another folder")


def with_digests(files: Sequence[InputFile]) -> list[InputFile]:
    """Record the SHA-256 of local files. A file that is rewritten with the same bytes then counts as unchanged.

    If the local files together are larger than `DIGEST_BYTES`, none gets a digest, because that would take long. Files
    in S3 need no digest, because their version is the ETag.
    """
    local = [file for file in files if "://" not in file.url]
    if sum(file.size for file in local) > DIGEST_BYTES:
        return list(files)
    found = dict(zip(local, in_parallel(lambda file: _digest(file.url, file.version), local), strict=True))
    return [replace(file, digest=found.get(file, "")) for file in files]


def has_same_content(url: str, before: tuple[int, str], digest: str, now: tuple[int, str]) -> bool:
    """Return whether a file still has the content that was recorded.

    before, now: (bytes, version), recorded and current. digest: the recorded SHA-256 of a local file, or "". If a
    local file has its old size but another version, the digest decides.
    """
    if before == now:
        return True
    return before[0] == now[0] and bool(digest) and "://" not in url and _digest(url, now[1]) == digest


def unchanged_files(pinned: Sequence[InputFile], listed: Files) -> list[InputFile]:
    """Return the pinned files with their current versions. Raises UserError if a file is gone or has other content.

    If some listed files are not pinned, logs a warning with their number.
    """
    files = []
    for file in pinned:
        if file.url not in listed:
            unpacked(file.url)  # raises an error with another remedy if only a submitted job has this file
            raise UserError(f"{file.url}: gone since the job began; put it back, or start again with --overwrite")
        size, version = listed[file.url]
        if not has_same_content(file.url, (file.size, file.version), file.digest, (size, version)):
            sizes = f"{file.size} bytes then, {size} now"
            if size == file.size and "://" not in file.url:
                sizes = "same size, other content" if file.digest else "same size, no digest of its content"
            raise UserError(
                f"{file.url}: changed since the job began ({sizes}); put the old file back, or start again with "
                "--overwrite"
            )
        files.append(replace(file, version=version))
    new = sorted(set(listed) - {file.url for file in pinned})
    if new:
        log.warning(
            "%d input files are newer than the job, and are not part of the job; the first is %s", len(new), new[0]
        )
    return files


def _future_names(config: JobConfig) -> Iterator[str]:
    """Yield examples of the names of files that the job writes into its output folder."""
    results = RESULT_NAMES if config.result_format in ("jsonl", "openai_batch") else ()
    for folder in ("", f"{RUN_FOLDER}/") if config.input.since else ("",):
        yield f"{folder}part-000000.parquet"
        yield from (f"{folder}{kind}{number}.jsonl" for kind in results for number in ("", "-0001"))


def _real(url: str, storage: StorageConfig) -> str:
    """Return a local path with links resolved (only before the first wildcard), or s3/bucket/key of an S3 URL."""
    fs, path = filesystem(url, storage)
    if not isinstance(fs, LocalFileSystem):
        return f"s3/{path}"
    if os.path.lexists(path):
        return os.path.realpath(path)
    fixed = fixed_part(path)
    return os.path.realpath(fixed).rstrip("/") + path[len(fixed.rstrip("/")) :]


def _digest(url: str, version: str) -> str:
    """Return the SHA-256 of a local file; "" if its modification time is not `version`, or changes during reading."""
    try:
        with open(url, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            same = str(os.fstat(file.fileno()).st_mtime_ns) == version == str(os.stat(url).st_mtime_ns)
    except FileNotFoundError:
        return ""
    return digest if same else ""
