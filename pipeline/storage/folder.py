"""Defines folders on a local disk or in an object store, with the operations that the commit protocol needs.

The most important operation is `create`. It writes a complete file or nothing, and never replaces an existing file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
from botocore.exceptions import BotoCoreError
from fsspec.implementations.local import LocalFileSystem
from pydantic import TypeAdapter

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.errors import ConditionRefused, StoreFailed
from pipeline.storage.working_dir import URL, unpacked

T = TypeVar("T")
BULK = 1000  # maximum number of objects that S3 removes in one call
STORE_ERRORS = (OSError, BotoCoreError)  # errors of a disk or an object store; s3fs turns most of them into OSErrors
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of a full or failing disk, not of a wrong path
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)  # errors if two folders cannot share a file


class FileInfo(NamedTuple):
    """A file's size in bytes and its tag (the store's ETag; see `LocalFolder.tag`)."""

    size: int
    tag: str = ""


def filesystem(url: str, storage: StorageConfig) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the fsspec filesystem of a URL, and the path in it. Raises UserError unless the URL is local or s3."""
    if url.startswith("~"):
        raise UserError(f"{url}: ~ is not replaced by the home folder here; give the whole path")
    if re.match(r"\w+:/(?!/[^/])", url) and not url.startswith("file:///"):
        raise UserError(f"{url}: not a URL such as s3://bucket/folder; correct it")
    scheme = url.split("://", 1)[0] if "://" in url else "file"
    if scheme == "file":
        return LocalFileSystem(), os.path.abspath(url.removeprefix("file://"))
    if url.startswith(URL):
        return LocalFileSystem(), unpacked(url)
    if scheme != "s3":
        raise UserError(
            f"{url}: storage {scheme}:// is not supported; use a local path or s3://, or mount the store as a folder"
        )
    from pipeline.storage.s3 import PatientS3FileSystem

    client = {"endpoint_url": storage.endpoint_url, "region_name": storage.region}
    fs = PatientS3FileSystem(
        retry_seconds=storage.retry_seconds,
        contact_seconds=storage.contact_seconds,
        client_kwargs={name: value for name, value in client.items() if value},
        use_listings_cache=False,  # no cache, because other processes change the folder
    )
    return fs, url.removeprefix("s3://").rstrip("/")


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a POSIX file system. url: the folder's path as written in the job file."""

    url: str
    path: Path

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError if it does not exist."""
        return (self.path / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read parts of it. Raises FileNotFoundError if it does not exist."""
        return open(self.path / name, "rb")

    def create(self, name: str, data: bytes) -> bool:
        """Create a complete file, and flush it to the disk. If the file exists, change nothing and return False."""
        target, temporary = self.path / name, self._write(name, data)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(target.parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Create or replace a file in one step."""
        target = self.path / name
        self._write(name, data).replace(target)
        _sync_folder(target.parent)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def exists(self, name: str) -> bool:
        return (self.path / name).is_file()

    def names(self, subfolder: str = "") -> list[str]:
        """Return the sorted names of the files directly in a subfolder; an empty list if there is no such subfolder."""
        try:
            with os.scandir(self.path / subfolder) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self) -> list[str]:
        """Return the sorted names of the folders directly in this folder."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
        return []

    def listed(self, stems: Collection[str], after: str) -> dict[str, FileInfo]:
        """Return name -> size and tag of each file whose name begins with one of `stems` or sorts after `after`."""
        lengths = {len(stem) for stem in stems}
        found: dict[str, FileInfo] = {}
        for name in self.names():
            if name > after or any(name[:length] in stems for length in lengths):
                with suppress(FileNotFoundError):
                    found[name] = FileInfo((self.path / name).stat().st_size)
        return found

    def tag(self, name: str) -> str:
        """Return the store's ETag of a file, which changes if the file's bytes change; empty on a local disk."""
        return ""

    def _write(self, name: str, data: bytes) -> Path:
        """Write `data` to a temporary file on the folder's file system, and flush it to the disk. Return its path."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        folder = self.path / "_job" / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{Path(name).name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # name the target in the error, not the temporary file
            temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        return temporary


def _sync_folder(path: Path) -> None:
    """Flush a folder to the disk, so that new files in the folder survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class ObjectFolder:
    """A prefix in an S3 bucket; see `LocalFolder` for the methods."""

    url: str
    fs: Any
    path: str

    def read(self, name: str) -> bytes:
        # one connection, because fsspec requests the size first if it may use several
        data: bytes = self.fs.cat_file(f"{self.path}/{name}", max_concurrency=1)
        return data

    def open(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self.fs.open(f"{self.path}/{name}", "rb", cache_type="none")
        return file

    def create(self, name: str, data: bytes) -> bool:
        """Create a file with a conditional put. Raises ConditionRefused if the store does not support such puts."""
        try:
            self._put(name, data, mode="create")
            return True
        except FileExistsError:
            return False

    def replace(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def _put(self, name: str, data: bytes, **options: str) -> None:
        # always a single put: a multipart upload may ignore the condition, and stays incomplete if the run is killed
        self.fs.pipe_file(f"{self.path}/{name}", data, chunksize=max(len(data), 2**20), **options)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # some stores raise this error for a missing file
            self.fs.rm_file(f"{self.path}/{name}")

    def remove_all(self, names: Sequence[str]) -> None:
        bucket, _, prefix = self.path.partition("/")
        keys = [f"{prefix}/{name}".removeprefix("/") for name in names]
        for first in range(0, len(keys), BULK):
            failed = [{"Key": key} for key in keys[first : first + BULK]]
            with suppress(StoreFailed):  # some stores lack this call, or require an MD5 that botocore no longer sends
                asked = {"Objects": failed, "Quiet": True}
                failed = self.fs.call_s3("delete_objects", Bucket=bucket, Delete=asked).get("Errors", [])
            for error in failed:  # remove one by one, because `call_s3` retries only whole calls
                self.remove(error["Key"].removeprefix(f"{prefix}/"))

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(f"{self.path}/{name}"))

    def names(self, subfolder: str = "") -> list[str]:
        return [name for name, _ in self._pages(subfolder)]

    def folders(self) -> list[str]:
        try:
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def listed(self, stems: Collection[str], after: str) -> dict[str, FileInfo]:
        requests = [{"stem": stem} for stem in stems] + [{"after": after}]
        # in parallel, because one listing is a sequence of requests for 1000 names each
        pages = in_parallel(lambda request: list(self._pages(**request)), requests)
        return {name: info for page in pages for name, info in page}

    def tag(self, name: str) -> str:
        bucket, _, key = f"{self.path}/{name}".partition("/")
        return str(self.fs.call_s3("head_object", Bucket=bucket, Key=key).get("ETag", "")).strip('"')

    def _pages(self, subfolder: str = "", stem: str = "", after: str = "") -> Iterator[tuple[str, FileInfo]]:
        """Yield name, size and tag of each file directly in a subfolder.

        stem: list only names that begin with it. after: list only names that sort after it.
        """
        bucket, _, key = f"{self.path}/{subfolder}".rstrip("/").partition("/")
        prefix = f"{key}/" if key else ""
        request = {"Bucket": bucket, "Prefix": prefix + stem, "Delimiter": "/"}
        if after:
            request["StartAfter"] = prefix + after
        while True:
            try:
                page = self.fs.call_s3("list_objects_v2", **request)
            except FileNotFoundError:
                return
            for entry in page.get("Contents", []):
                if entry["Key"] != prefix:  # skip the object that marks an empty folder
                    tag = str(entry.get("ETag", "")).strip('"')
                    yield entry["Key"][len(prefix) :], FileInfo(entry["Size"], tag)
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]


Folder = LocalFolder | ObjectFolder  # an output folder; file names are relative to it and may contain slashes


def open_folder(url: str, storage: StorageConfig) -> Folder:
    """Return the folder at a URL. The folder need not exist."""
    fs, path = filesystem(url, storage)
    return LocalFolder(url, Path(path)) if isinstance(fs, LocalFileSystem) else ObjectFolder(url, fs, path)


def read_json(folder: Folder, name: str, kind: type[T]) -> T | None:
    """Return the value in a JSON file; None if the file is missing or damaged, or holds no value of type `kind`."""
    try:
        return TypeAdapter(kind).validate_json(folder.read(name), strict=True)
    except (FileNotFoundError, ValueError):
        return None


def write_json(folder: Folder, name: str, values: Any, indent: int = 1) -> None:
    """Create or replace a JSON file."""
    folder.replace(name, (json.dumps(values, indent=indent) + "\n").encode())


def check_location(folder: Folder) -> None:
    """Raise UserError if a local folder's path is a file, or the user may not create the folder. Write nothing."""
    if not isinstance(folder, LocalFolder):
        return
    path = folder.path
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        raise UserError(f"output.path: {path} is a file; give a folder")
    if path != folder.path and not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"output.path: {folder.path} cannot be created: {path} is not writable")


def make_writable(folder: Folder) -> None:
    """Create a folder, and check with a test file that `create` works and never replaces a file.

    Raises UserError if a local folder is not writable, or if a store has no conditional puts.
    """
    name = f"_job/probe-{uuid.uuid4().hex}"  # not in _job/tmp: some file systems have links only within a folder
    try:
        try:
            folder.create(name, b"1")
        except FileNotFoundError:  # try again: another run may just have removed temporary files
            folder.create(name, b"1")
        is_conditional = not folder.create(name, b"2")
        folder.remove(name)
    except ConditionRefused:
        folder.replace(name, b"3")  # fails too if the store refused for another reason
        folder.remove(name)
        is_conditional = False
    except OSError as error:
        if not isinstance(folder, LocalFolder) or error.errno in FULL:
            raise
        if error.errno in NO_LINKS:
            raise UserError(
                f"output.path: the file system of {folder.path} has no hard links ({error.strerror}), and a commit "
                "needs one; choose a local disk, NFS or s3://"
            ) from None
        raise UserError(f"output.path: {folder.path} cannot be written: {error.strerror}") from None
    if not is_conditional:
        raise UserError(
            f"output.path: the store of {folder.url} has no conditional puts (If-None-Match: *), without which two "
            "runs could write the same rows; choose another store"
        )
