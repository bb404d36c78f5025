"""A job's checkpoint: a local folder, `s3://` or the hub. Pinned when the job is planned, fetched once per node.

Planning fetches the small files alone. On a node a file lock lets one process download while the others wait;
what has come is checked, and a record written after the last file is what makes a folder count as whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from actors.engine.errors import UserError
from actors.engine.loading import Checkpoint, inspect, refuse_file
from actors.engine.weights import tensor_sizes, weight_files
from pipeline.checkpoints.local import (
    CACHE_VARIABLE,
    SMALL,
    PinnedFolder,
    cache_root,
    check_same,
    digests,
    file_digest,
    pin,
)
from pipeline.checkpoints.progress import download_progress
from pipeline.checkpoints.stores import BucketStore, HubStore, RemoteFile, Store
from pipeline.config.job import ModelConfig, StorageConfig

log = logging.getLogger(__name__)
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)@(\S+)")
UNPINNED = re.compile(r"\w[\w.-]*/\w[\w.-]*")
TRIES = 2
HEADERS_AT_ONCE = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a bucket or on the hub, pinned to versions of its files.

    path: as the job says it. commit: on the hub, None for a bucket. key: its name in a node's cache. cache: that
    folder, None: each node's default.
    """

    path: str
    commit: str | None
    endpoint: str | None
    key: str
    files: tuple[RemoteFile, ...]
    storage: StorageConfig
    cache: str | None

    def store(self) -> Store:
        """Where its files come from."""
        if self.commit is None:
            return BucketStore(self.path, self.storage)
        given = self.cache or os.environ.get(CACHE_VARIABLE)
        return HubStore(
            self.path.partition("@")[0], self.commit, self.endpoint, str(self.root() / "hub") if given else None
        )

    def root(self) -> Path:
        """This node's cache."""
        return cache_root(self.cache) / "checkpoints"


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint that has been found and looked at. source: a local folder, or what `fetch` takes on a node."""

    checkpoint: Checkpoint
    source: str | RemoteCheckpoint

    def identity(self) -> dict[str, Any]:
        """What the job's fingerprint covers: digests of a folder's files, or the versions that a store tells."""
        if isinstance(self.source, str):
            return {"files": digests(self.checkpoint.path)}
        files = {"files": {file.name: f"{file.size}:{file.version}" for file in self.source.files}}
        return files if self.source.commit is None else {**files, "hub": self.source.path, "commit": self.source.commit}

    def pinned(self) -> PinnedFolder | RemoteCheckpoint:
        """What travels to the actors: `fetch` there refuses files that differ from the planned ones."""
        return pin(self.checkpoint.path) if isinstance(self.source, str) else self.source

    def sizes(self) -> dict[str, int] | None:
        """Numbers of every tensor, by reads of the headers in the store; None: the folder has them."""
        if isinstance(self.source, str):
            return None
        weights = [file for file in self.source.files if file.name.endswith(".safetensors")]
        sizes: dict[str, int] = {}
        with ThreadPoolExecutor(HEADERS_AT_ONCE) as threads:
            for each in threads.map(self.source.store().sizes, weights):
                sizes |= each
        return sizes


def resolve_checkpoint(
    model: ModelConfig, storage: StorageConfig, pinned: dict[str, Any] | None = None
) -> ResolvedCheckpoint:
    """Find the checkpoint that `model.path` names, pin it and look at it; of a remote one only small files come.

    pinned: identity of the job that is resumed; a hub revision that has moved since then stays at its commit.
    Raises ValueError of one line: nothing there, no access, no network, or a checkpoint that cannot be run.
    """
    path = model.path
    refuse_file(path)
    if "://" not in path and not Path(path).is_dir():
        if UNPINNED.fullmatch(path):
            raise UserError(
                f"{path}: no such checkpoint folder; if a model on the hub is meant, add @revision, for example "
                f"{path}@main or {path}@ and a commit"
            )
        named = HUB.fullmatch(path)
        if named is not None:
            return _locate_hub(named[1], named[2], model, storage, pinned or {})
    if "://" not in path:
        return ResolvedCheckpoint(inspect(path), str(Path(path).resolve()))
    if not path.startswith("s3://"):
        raise UserError(f"{path}: checkpoints come from a local folder, s3:// or the hub (owner/name@revision)")
    url = path.rstrip("/")
    return _look(url, None, None, BucketStore(url, storage).files(), model, storage)


def fetch(source: str | PinnedFolder | RemoteCheckpoint, *, weights: bool = True) -> Path:
    """The checkpoint's folder on this node, fetched if it is not there yet; safe to call from many processes.

    weights: False leaves them where they are. Raises ValueError of one line if the store does not give the files
    that were pinned.
    """
    if isinstance(source, str):
        return Path(source)
    if isinstance(source, PinnedFolder):
        return check_same(source, weights=weights)
    files = [file for file in source.files if weights or not file.name.endswith(".safetensors")]
    root = source.root()
    record = root / f"{source.key}{'' if weights else '-small'}.json"
    folder = _recorded(record, files)
    if folder is not None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{source.key}.lock")
        lock.acquire()
    except OSError as error:
        raise UserError(f"{root}: cannot hold checkpoints: {error.strerror}; set model.cache") from None
    with lock:
        folder = _recorded(record, files)
        if folder is None:  # else another process has fetched it while this one waited
            folder, found = _download(source, files, root / source.key)
            temporary = record.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({"path": source.path, "folder": str(folder), "files": found}, indent=2))
            temporary.replace(record)
    return folder


def _locate_hub(
    repo: str, revision: str, model: ModelConfig, storage: StorageConfig, pinned: dict[str, Any]
) -> ResolvedCheckpoint:
    if pinned.get("hub") == model.path:
        revision = str(pinned["commit"])
    endpoint = os.environ.get("HF_ENDPOINT") or None
    commit, files = HubStore(repo, revision, endpoint, None).commit()
    return _look(model.path, commit, endpoint, files, model, storage)


def _look(
    path: str,
    commit: str | None,
    endpoint: str | None,
    listed: Sequence[RemoteFile],
    model: ModelConfig,
    storage: StorageConfig,
) -> ResolvedCheckpoint:
    """Fetch the small files, inspect them, and keep of the rest what the index names."""
    files = [file for file in listed if file.name.endswith((*SMALL, ".safetensors"))]
    text = "\n".join([path, str(commit), *(f"{file.name} {file.size} {file.version}" for file in files)])
    name = re.sub(r"[^\w.-]+", "-", path.removeprefix("s3://"))[-60:].strip("-.")
    key = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    remote = RemoteCheckpoint(path, commit, endpoint, key, tuple(files), storage.after_planning(), model.cache)
    folder = fetch(remote, weights=False)
    names = [file.name for file in listed]
    try:
        checkpoint = inspect(folder, names)
        weights = weight_files(folder, names)
    except ValueError as error:
        raise UserError(str(error).replace(str(folder), path)) from None
    wanted = tuple(file for file in files if file.name in weights or not file.name.endswith(".safetensors"))
    return ResolvedCheckpoint(checkpoint, replace(remote, files=wanted))


def _recorded(record: Path, files: Sequence[RemoteFile]) -> Path | None:
    """The folder that a record vouches for, None if there is none or a file is not as long as it should be."""
    try:
        values = json.loads(record.read_text())
        folder = Path(values["folder"])
        for file in files:
            if values["files"][file.name]["size"] != file.size or (folder / file.name).stat().st_size != file.size:
                log.warning("%s: damaged since it was fetched; it is fetched again", folder / file.name)
                return None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        log.warning("%s: not a record of a checkpoint (%s); it is fetched again", record, error)
        return None
    return folder


def _download(
    source: RemoteCheckpoint, files: Sequence[RemoteFile], folder: Path
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Folder with the files, and size and SHA-256 of each; one that came damaged is fetched once more."""
    store = source.store()
    total = sum(file.size for file in files)
    problem = ""
    for _ in range(TRIES):
        with download_progress(source.path, total, store.arrivals(folder)):
            place = store.download(files, folder)
        found: dict[str, dict[str, Any]] = {}
        for file in files:
            path = place / file.name
            try:
                found[file.name] = {"size": file.size, "sha256": _checked(path, file, store.digests(file))}
            except ValueError as error:
                problem = str(error)
                path.resolve().unlink(missing_ok=True)  # on the hub's side a link to the content
                path.unlink(missing_ok=True)
        if len(found) == len(files):
            return place, found
        log.warning("%s", problem)
    raise UserError(problem)


def _checked(path: Path, file: RemoteFile, told: dict[str, str]) -> str:
    """SHA-256 of a file that is what the store says; ValueError of one line if it is not."""
    if not path.is_file() or path.stat().st_size != file.size:
        raise UserError(f"{path}: not the {file.size} bytes that the store lists")
    sha256 = file_digest(path, "sha256")
    for algorithm, wanted in told.items():
        if (sha256 if algorithm == "sha256" else file_digest(path, algorithm)) != wanted:
            raise UserError(f"{path}: came damaged: its {algorithm} is not the store's {wanted}")
    if path.suffix == ".safetensors":
        with open(path, "rb") as opened:
            tensor_sizes(partial(os.pread, opened.fileno()), file.size, str(path))
    return sha256
