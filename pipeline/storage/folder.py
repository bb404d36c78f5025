"""Folders on a local disk or in an object store, with the few operations that the commit protocol needs.

`create` is the one that matters: it writes a whole file, or nothing, and never over an existing one.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import fsspec
from botocore.exceptions import BotoCoreError
from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.errors import ConditionRefused

log = logging.getLogger(__name__)
BULK = 1000  # objects that S3 removes in one call
STORE_ERRORS = (OSError, BotoCoreError)  # what a disk or an object store may raise; s3fs makes most of it OSErrors


class Folder(Protocol):
    """A folder of an output; names are relative to it and may hold slashes."""

    @property
    def url(self) -> str:
        """Where it is, as the job file says it."""
        ...

    def read(self, name: str) -> bytes:
        """The file's bytes; FileNotFoundError if there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file, whole and durable; False, and nothing changed, if the name is taken."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a file, whole, over whatever is there."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        ...

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files, many in one call where the store can; nothing happens for those that are not there."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def names(self, subfolder: str = "") -> list[str]:
        """Names of the files directly in a subfolder, sorted; none if there is no such folder."""
        ...

    def first_names(self) -> Iterator[str]:
        """Names of the files directly in the folder, in order, asked for as they are taken."""
        ...

    def sizes(self, stems: Collection[str], after: str) -> dict[str, int]:
        """Name -> bytes of the files directly in the folder that begin with one of `stems` or sort after `after`."""
        ...


def filesystem(url: str, storage: StorageConfig) -> tuple[fsspec.AbstractFileSystem, str]:
    """fsspec filesystem of a URL and the path in it. ValueError for a scheme other than local and s3."""
    scheme = url.split("://", 1)[0] if "://" in url else "file"
    if scheme == "file":
        return LocalFileSystem(), os.path.abspath(url.removeprefix("file://"))
    if scheme != "s3":
        raise UserError(f"{url}: storage {scheme}:// is not supported; use a local path or s3://")
    client: dict[str, Any] = {}
    if storage.endpoint_url:
        client["endpoint_url"] = storage.endpoint_url
    if storage.region:
        client["region_name"] = storage.region
    from pipeline.storage.s3 import PatientS3FileSystem

    fs = PatientS3FileSystem(
        retry_seconds=storage.retry_seconds,
        contact_seconds=storage.contact_seconds,
        client_kwargs=client,
        use_listings_cache=False,  # another process may have written since
    )
    return fs, url.removeprefix("s3://").rstrip("/")


def open_folder(url: str, storage: StorageConfig) -> Folder:
    """The folder at a URL. It need not exist yet."""
    fs, path = filesystem(url, storage)
    return LocalFolder(url, Path(path)) if isinstance(fs, LocalFileSystem) else ObjectFolder(url, fs, path)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a POSIX filesystem."""

    url: str
    path: Path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def create(self, name: str, data: bytes) -> bool:
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
        target = self.path / name
        self._write(name, data).replace(target)
        _sync_folder(target.parent)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def exists(self, name: str) -> bool:
        return (self.path / name).is_file()

    def names(self, subfolder: str = "") -> list[str]:
        folder = self.path / subfolder
        if not folder.is_dir():
            return []
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())

    def first_names(self) -> Iterator[str]:
        yield from self.names()

    def sizes(self, stems: Collection[str], after: str) -> dict[str, int]:
        lengths = {len(stem) for stem in stems}
        found: dict[str, int] = {}
        for name in self.names():
            if name > after or any(name[:length] in stems for length in lengths):
                with suppress(FileNotFoundError):
                    found[name] = (self.path / name).stat().st_size
        return found

    def _write(self, name: str, data: bytes) -> Path:
        """A temporary file on the same filesystem, written to the disk."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        folder = self.path / "_job" / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{Path(name).name}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk would stay full of halves; and does not say which
            temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path / name)) from error
        return temporary


def _sync_folder(path: Path) -> None:
    """A new name is durable only once its folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class ObjectFolder:
    """A prefix in an S3 bucket, through `PatientS3FileSystem`. conditional: the store heeds conditional puts."""

    url: str
    fs: Any
    path: str
    conditional: bool = True

    def read(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.path}/{name}", max_concurrency=1)  # more ask for the size first
        return data

    def create(self, name: str, data: bytes) -> bool:
        if self.conditional:
            # if a refusal means something else, the plain put meets it again
            with suppress(ConditionRefused):
                return self.put_if_absent(name, data)
        if self.fs.exists(f"{self.path}/{name}"):
            return False
        self._put(name, data)
        return True

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """`create` by the store's own condition alone; ConditionRefused if it has none."""
        try:
            self._put(name, data, mode="create")
            return True
        except FileExistsError:
            return False

    def replace(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def _put(self, name: str, data: bytes, **options: str) -> None:
        # one put, however large: a multipart completion may ignore the condition, and parts of a killed run stay
        self.fs.pipe_file(f"{self.path}/{name}", data, chunksize=max(len(data), 2**20), **options)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # some stores say so
            self.fs.rm_file(f"{self.path}/{name}")

    def remove_all(self, names: Sequence[str]) -> None:
        bucket, _, prefix = self.path.partition("/")
        keys = [f"{prefix}/{name}".removeprefix("/") for name in names]
        for first in range(0, len(keys), BULK):
            objects = [{"Key": key} for key in keys[first : first + BULK]]
            answer = self.fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", []):  # the call is not tried again for these: one by one, they are
                self.remove(error["Key"].removeprefix(f"{prefix}/"))

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(f"{self.path}/{name}"))

    def names(self, subfolder: str = "") -> list[str]:
        return [name for name, _ in self._listed(subfolder)]

    def first_names(self) -> Iterator[str]:
        return (name for name, _ in self._listed())

    def sizes(self, stems: Collection[str], after: str) -> dict[str, int]:
        asked = [{"stem": stem} for stem in stems] + [{"after": after}]
        # a request for a thousand names: side by side, as each waits for the one before it otherwise
        pages = in_parallel(lambda one: list(self._listed(**one)), asked)
        return {name: size for page in pages for name, size in page}

    def _listed(self, subfolder: str = "", stem: str = "", after: str = "") -> Iterator[tuple[str, int]]:
        """Names and sizes directly in a subfolder, those that begin with `stem` and sort after `after`."""
        bucket, _, key = f"{self.path}/{subfolder}".rstrip("/").partition("/")
        prefix = f"{key}/" if key else ""
        asked = {"Bucket": bucket, "Prefix": prefix + stem, "Delimiter": "/"}
        if after:
            asked["StartAfter"] = prefix + after
        while True:
            try:
                page = self.fs.call_s3("list_objects_v2", **asked)
            except FileNotFoundError:
                return
            for entry in page.get("Contents", []):
                if entry["Key"] != prefix:  # the marker that makes an empty folder
                    yield entry["Key"][len(prefix) :], entry["Size"]
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]


def probe_create(folder: Folder) -> Folder:
    """The folder to go on with: the same, or after a warning, if the store may let `create` write over a file, one
    that looks before it writes.
    """
    name = f"_job/probe-{uuid.uuid4().hex}"
    create = folder.put_if_absent if isinstance(folder, ObjectFolder) else folder.create
    try:
        with suppress(ConditionRefused):
            if create(name, b"1") and not create(name, b"2"):
                return folder
    finally:
        folder.remove(name)
    log.warning("%s: this store ignores conditional puts: two runs at once could write the same part twice", folder.url)
    return replace(folder, conditional=False) if isinstance(folder, ObjectFolder) else folder
