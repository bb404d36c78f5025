"""Lists, inspects and downloads checkpoints in a store, which is an S3 bucket or the hub.

All methods raise UserError if files are missing or access is refused, and StoreFailed if the store fails.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, flat
from actors.engine.model.file_digests import CACHE_VARIABLE, cache_root
from actors.engine.model.weights import StoredTensor, file_tensors, gib
from pipeline.config.job import StorageConfig
from pipeline.storage.errors import NoSuchBucket, StoreFailed
from pipeline.storage.folder import FULL, filesystem

CHUNK = 16 * 2**20  # bytes of one ranged read
STREAMS = 4  # number of files to download in parallel
OF_DISK = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)  # errors of the cache folder, not of the hub


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store's listing. size: in bytes. version: changes with the content. sha256: None if not listed."""

    name: str
    size: int
    version: str
    sha256: str | None = None


@dataclass(frozen=True)
class BucketStore:
    """A checkpoint folder (prefix) in an S3 bucket."""

    url: str
    storage: StorageConfig

    def files(self) -> list[RemoteFile]:
        """Return the files in the checkpoint's folder, without subfolders, sorted by name."""
        fs, path = filesystem(self.url, self.storage)
        with self._user_errors():
            entries = [entry for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
        found = [
            RemoteFile(entry["name"].removeprefix(f"{path}/"), int(entry["size"]), str(entry["ETag"]).strip('"'))
            for entry in entries
            if entry["name"].startswith(f"{path}/") and not entry["name"].endswith("/")
        ]
        if not found:
            raise UserError(f"{self.url}: no checkpoint here: the bucket has no such folder")
        for file in found:
            if "/" in file.name:  # each node stores the file under this name
                raise UserError(f"{self.url}: the bucket lists {file.name!r}, which cannot be a file name in a folder")
        return sorted(found, key=lambda file: file.name)

    def tensors(self, file: RemoteFile) -> dict[str, StoredTensor]:
        """Return tensor name -> `StoredTensor`, from the header of the safetensors file `file`."""
        fs, path = filesystem(self.url, self.storage)

        def read(count: int, first: int) -> bytes:
            data: bytes = fs.cat_file(f"{path}/{file.name}", start=first, end=first + count)
            return data

        with self._user_errors():
            return file_tensors(read, file.size, f"{self.url}/{file.name}")

    def download(self, files: Sequence[RemoteFile], folder: Path) -> Path:
        """Download missing files to `folder`, and return it. The caller must hold a lock, and verify the contents."""
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name: path.stat().st_size for path in folder.iterdir()}
        missing = [file for file in files if present.get(file.name) != file.size]
        needed, free = sum(file.size for file in missing), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{self.url}: {gib(needed)} to download, but {folder} has {gib(free)} left: free "
                "some space, or set model.cache"
            )
        with self._user_errors(), ThreadPoolExecutor(STREAMS) as threads:
            list(threads.map(lambda file: self._get(file, folder), missing))
        return folder

    def digests(self, file: RemoteFile) -> dict[str, str]:
        """Return algorithm -> hexadecimal digest of a file's content, for the digests that the store knows."""
        fs, path = filesystem(self.url, self.storage)
        bucket, _, key = f"{path}/{file.name}".partition("/")
        with self._user_errors():
            head = fs.call_s3("head_object", Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        found: dict[str, str] = {}
        checksum = head.get("ChecksumSHA256", "-")
        # after a multipart upload, the checksum may be that of the parts' checksums, not of the content: skip it
        if "-" not in checksum and head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
            found["sha256"] = base64.b64decode(checksum).hex()
        # the ETag is the content's MD5 except after multipart uploads, with encryption keys, and in directory buckets
        encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
        if re.fullmatch(r"[0-9a-f]{32}", file.version) and not encrypted and not bucket.endswith("--x-s3"):
            found["md5"] = file.version
        return found

    def _get(self, file: RemoteFile, folder: Path) -> None:
        fs, path = filesystem(self.url, self.storage)
        with fs.open(f"{path}/{file.name}", "rb", block_size=CHUNK, cache_type="none") as source:
            # one check suffices: s3fs sends the ETag as If-Match, so all reads return this version
            if str(source.details.get("ETag", file.version)).strip('"') != file.version:
                raise UserError(
                    f"{self.url}/{file.name}: changed since the job was planned; restore it, or start again with "
                    "--overwrite"
                )
            with open(folder / file.name, "wb") as target:
                while data := source.read(CHUNK):
                    target.write(data)

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise UserError(f"{self.url}: no checkpoint here: no such file") from None
        except PermissionError as error:  # the error already names the URL
            raise UserError(flat(error)) from None
        except NoSuchBucket as error:
            raise UserError(f"{self.url}: cannot be read: {flat(error)}") from None


@dataclass(frozen=True)
class HubStore:
    """A commit of a model repository on the hub. huggingface_hub downloads the files, under its own locks.

    endpoint: address of the hub; None: the public hub. cache: folder for downloads (`model.cache`); None:
    $SKIPDECODE_CACHE if it is set, else huggingface_hub's cache.
    """

    repo: str
    revision: str
    endpoint: str | None
    cache: str | None

    def commit(self) -> tuple[str, list[RemoteFile]]:
        """Return the current commit of `revision` (a branch, tag or commit), and the commit's files."""
        from huggingface_hub import HfApi

        with self._user_errors():
            info = HfApi(endpoint=self.endpoint).model_info(self.repo, revision=self.revision, files_metadata=True)
        assert info.sha is not None
        files = [
            RemoteFile(one.rfilename, one.size or 0, one.blob_id or "", one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or []
            if "/" not in one.rfilename
        ]
        return info.sha, sorted(files, key=lambda file: file.name)

    def tensors(self, file: RemoteFile) -> dict[str, StoredTensor]:
        """Return tensor name -> `StoredTensor`, from the header of the safetensors file `file`."""
        from huggingface_hub import HfApi

        with self._user_errors():
            api = HfApi(endpoint=self.endpoint)
            header = api.parse_safetensors_file_metadata(self.repo, file.name, revision=self.revision)
        where = f"{self.repo}@{self.revision}/{file.name}"
        return {name: StoredTensor(where, tuple(tensor.shape)) for name, tensor in header.tensors.items()}

    def download(self, files: Sequence[RemoteFile], folder: Path) -> Path:
        """Download files to huggingface_hub's cache, and return their folder in it. `folder` is ignored."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        names = [file.name for file in files]
        options: dict[str, Any] = {"revision": self.revision, "endpoint": self.endpoint, "cache_dir": self._cache()}
        with self._user_errors():
            return Path(snapshot_download(self.repo, allow_patterns=names, max_workers=STREAMS, **options))

    def digests(self, file: RemoteFile) -> dict[str, str]:
        """Return {"sha256": hexadecimal digest of a file's content}; {} if the hub lists no SHA-256."""
        return {} if file.sha256 is None else {"sha256": file.sha256}

    def _cache(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        own = self.cache or os.environ.get(CACHE_VARIABLE)
        return cache_root(self.cache) / "checkpoints" / "hub" if own else Path(HF_HUB_CACHE)

    @contextmanager
    def _user_errors(self) -> Iterator[None]:
        from huggingface_hub import errors

        name, where = f"{self.repo}@{self.revision}", self.endpoint or "https://huggingface.co"
        try:
            yield
        except errors.GatedRepoError:
            raise UserError(f"{name}: gated model: ask for access on the hub, and set HF_TOKEN to your token") from None
        except errors.RepositoryNotFoundError:
            raise UserError(
                f"{name}: no such model on the hub, or no access to it: a private model needs HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(f"{name}: the model has no such revision: give a branch, tag or commit") from None
        except (errors.SafetensorsParsingError, errors.HFValidationError) as error:
            raise UserError(f"{name}: {flat(error)}") from None
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
            if getattr(error, "errno", None) in OF_DISK:
                raise UserError(
                    f"{self._cache()}: cannot hold {name}: {flat(error)}; free space, or set model.cache"
                ) from None
            raise StoreFailed(
                f"{name}: the hub at {where} cannot be reached or does not answer: {flat(error)[:200]}; "
                "without network use a local folder or s3://"
            ) from None
