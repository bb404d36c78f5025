"""Resolves a job's checkpoint (a local folder, `s3://` or the hub) during planning, and fetches it on each node.

Planning pins the versions of all files and fetches only the small ones. On each node, one process holds a file lock and
downloads and verifies the files, while the others wait. It then writes a record with the name of the complete folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from actors.engine.errors import UserError
from actors.engine.model.file_digests import SMALL, cache_root, digests, file_digest, weights_digest
from actors.engine.model.loading import Checkpoint, inspect, refuse_file, with_adapter
from actors.engine.model.speed_adapter import FILES as ADAPTER_FILES
from actors.engine.model.speed_adapter import base_digest
from actors.engine.model.weights import StoredTensor, folder_tensors, gib, joined, weight_files
from actors.engine.schedule.schedule import Schedule
from pipeline.checkpoints.local import PinnedFolder, check_same, pin
from pipeline.checkpoints.stores import BucketStore, HubStore, RemoteFile
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.messages import where_sought

log = logging.getLogger(__name__)
PLACEHOLDER = "owner/name@revision"  # the model.path that `skipdecode init` writes if it knows no model
HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)@(\S+)")  # owner/name@revision
UNPINNED = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name
HEADERS_AT_ONCE = 8  # number of weights files whose headers are read in parallel


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a bucket or on the hub, pinned to versions of its files."""

    path: str  # the checkpoint's path in the job file
    store: BucketStore | HubStore
    key: str  # identifies the checkpoint in a node's cache
    files: tuple[RemoteFile, ...]
    cache: str | None  # cache folder on every node; None: the node's default

    @classmethod
    def pinned(
        cls, path: str, store: BucketStore | HubStore, files: Sequence[RemoteFile], cache: str | None
    ) -> RemoteCheckpoint:
        """Return a checkpoint of `files`. Path, commit, and names, sizes and versions of files determine its `key`."""
        commit = store.revision if isinstance(store, HubStore) else None
        text = "\n".join([path, str(commit), *(f"{file.name} {file.size} {file.version}" for file in files)])
        name = re.sub(r"[^\w.-]+", "-", path.removeprefix("s3://"))[-60:].strip("-.")
        return cls(path, store, f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}", tuple(files), cache)

    @property
    def commit(self) -> str | None:
        """Commit of the model on the hub; None for a checkpoint in a bucket."""
        return self.store.revision if isinstance(self.store, HubStore) else None

    @property
    def weights(self) -> list[RemoteFile]:
        """The files that hold the weights."""
        return [file for file in self.files if file.name.endswith(".safetensors")]


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint that was resolved and inspected.

    source: local folder or pinned remote files. adapter: source of the speed adapter; None if there is none.
    """

    checkpoint: Checkpoint
    source: str | RemoteCheckpoint
    adapter: str | RemoteCheckpoint | None = None

    def identity(self) -> dict[str, Any]:
        """Return values that identify the files (see `_versions`), for the job's fingerprint."""
        values: dict[str, Any] = {"files": _versions(self.source)}
        if self.adapter is not None:
            found = _versions(self.adapter)
            values["speed_adapter"] = {name: found[name] for name in ADAPTER_FILES}
        if isinstance(self.source, str) or self.source.commit is None:
            return values
        return {**values, "hub": self.source.path, "commit": self.source.commit}

    def pinned(self) -> PinnedFolder | RemoteCheckpoint:
        """Return the checkpoint's source for other processes, in which `fetch` then refuses changed files."""
        return pin(Path(self.source)) if isinstance(self.source, str) else self.source

    def pinned_adapter(self) -> PinnedFolder | RemoteCheckpoint | None:
        """Return the speed adapter's source for other processes, in which `fetch` then refuses changed files."""
        return pin(Path(self.adapter)) if isinstance(self.adapter, str) else self.adapter

    def schedule(self, changes: dict[str, Any], model: ModelConfig, *, unadapted: bool) -> Schedule:
        """Return the checkpoint's schedule with `changes` to its keys.

        Raises UserError if the schedule is impossible. Unless `unadapted`, the checkpoint must be trained for it.
        """
        if unadapted:
            return self.checkpoint.schedule(changes)
        return self.checkpoint.adapted_schedule(changes, model.path, "set schedule.unadapted: true")

    def weights_digest(self) -> str | None:
        """Return a digest of the weights, to check a speed adapter's base. None if the store omits a file's SHA-256."""
        if isinstance(self.source, str):
            return base_digest(self.checkpoint.path)
        found = {file.name: self.source.store.digests(file).get("sha256") for file in self.source.weights}
        known = {name: digest for name, digest in found.items() if digest is not None}
        return weights_digest(known) if len(known) == len(found) else None

    def tensors(self) -> dict[str, StoredTensor]:
        """Return tensor name -> `StoredTensor`. Read only the headers of the weights files."""
        if isinstance(self.source, str):
            return folder_tensors(self.checkpoint.path)
        with ThreadPoolExecutor(HEADERS_AT_ONCE) as threads:
            return joined(threads.map(self.source.store.tensors, self.source.weights))


def _versions(source: str | RemoteCheckpoint) -> dict[str, str]:
    """Return file name -> digest (in a local folder), or file name -> size and version (in a store's listing)."""
    if isinstance(source, str):
        return digests(Path(source))
    return {file.name: f"{file.size}:{file.version}" for file in source.files}


def resolve_checkpoint(
    model: ModelConfig, storage: StorageConfig, pinned: dict[str, Any] | None = None
) -> ResolvedCheckpoint:
    """Locate the checkpoint of `model.path`, pin its files and inspect it. Download small files, but no weights.

    A speed adapter is downloaded whole, and must name the checkpoint as its base. If a store does not list the SHA-256
    of all weights files, the base is checked later, when the weights are loaded.

    pinned: the result of `identity()` when a resumed job was planned. Its commit is used even if the branch has moved
    since. Raises UserError if the checkpoint is missing, unreadable or not supported, and StoreFailed if the store
    fails.
    """
    path = model.path
    refuse_file(path)
    store: BucketStore | HubStore
    if "://" not in path and Path(path).is_dir():
        checkpoint = inspect(path, by_vllm=model.engine == "vllm")
        return _with_adapter(ResolvedCheckpoint(checkpoint, str(Path(path).resolve())), model, storage)
    if path.startswith("s3://"):
        path = path.rstrip("/")
        files, store = BucketStore(path, storage).files(), BucketStore(path, storage.after_planning())
    elif "://" in path:
        raise UserError(f"{path}: checkpoints come from a local folder, s3:// or the hub (owner/name@revision)")
    elif path == PLACEHOLDER:
        raise UserError(f"model.path: {path} is an example: replace it with a checkpoint folder or a model on the hub")
    elif named := HUB.fullmatch(path):
        revision = str(pinned["commit"]) if pinned is not None and pinned.get("hub") == path else named[2]
        store = HubStore(named[1], revision, os.environ.get("HF_ENDPOINT") or None, model.cache)
        commit, files = store.commit()
        store = replace(store, revision=commit)
    else:
        hub = f"; for a model on the hub, add @revision, for example {path}@main or {path}@COMMIT"
        hint = hub if UNPINNED.fullmatch(path) else ""
        raise UserError(f"{path}: no such checkpoint folder{where_sought(path)}{hint}")
    kept = [file for file in files if file.name.endswith((*SMALL, ".safetensors"))]
    remote = RemoteCheckpoint.pinned(path, store, kept, model.cache)
    folder, names = fetch(remote, weights=False), [file.name for file in files]
    try:
        checkpoint = inspect(folder, names, by_vllm=model.engine == "vllm")
        weights = weight_files(folder, names)
    except ValueError as error:
        raise UserError(str(error).replace(str(folder), path)) from None
    needed = tuple(file for file in kept if file.name in weights or not file.name.endswith(".safetensors"))
    return _with_adapter(ResolvedCheckpoint(checkpoint, replace(remote, files=needed)), model, storage)


def _with_adapter(base: ResolvedCheckpoint, model: ModelConfig, storage: StorageConfig) -> ResolvedCheckpoint:
    """Return `base` with `model.speed_adapter`, if set. Raises UserError if the adapter names another base."""
    if model.speed_adapter is None:
        return base
    path = str(model.speed_adapter).rstrip("/")
    source: str | RemoteCheckpoint
    if path.startswith("s3://"):
        files = [file for file in BucketStore(path, storage).files() if file.name in ADAPTER_FILES]
        source = RemoteCheckpoint.pinned(path, BucketStore(path, storage.after_planning()), files, model.cache)
    elif "://" in path or not Path(path).is_dir():
        raise UserError(
            f"{path}: no such folder{where_sought(path)}; a speed adapter comes from a local folder or s3://"
        )
    else:
        source = str(Path(path).resolve())
    folder = fetch(source)
    try:
        checkpoint = with_adapter(base.checkpoint, folder)
        assert checkpoint.adapter is not None
        digest = base.weights_digest()
        if digest is not None:
            checkpoint.adapter.check_base(digest, model.path)
    except ValueError as error:
        raise UserError(str(error).replace(str(folder), path)) from None
    return ResolvedCheckpoint(checkpoint, base.source, source)


def fetch(source: str | PinnedFolder | RemoteCheckpoint, *, weights: bool = True) -> Path:
    """Download missing files, and return the checkpoint's folder on this node. Many processes may call this at once.

    weights: whether the weights are needed too. Raises UserError if the files differ from the pinned ones or do not fit
    into the cache, and StoreFailed if the store fails.
    """
    if isinstance(source, str):
        return Path(source)
    if isinstance(source, PinnedFolder):
        return check_same(source, weights=weights)
    files = [file for file in source.files if weights or not file.name.endswith(".safetensors")]
    root = cache_root(source.cache) / "checkpoints"
    record = root / f"{source.key}{'' if weights else '-small'}.txt"  # names the folder once all files are there
    folder = _whole_folder(record, files)
    if folder is not None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{source.key}.lock").acquire()
    except OSError as error:
        raise UserError(f"{root}: cannot hold checkpoints: {error.strerror}; set model.cache") from None
    with lock:
        folder = _whole_folder(record, files)
        if folder is None:  # not downloaded by another process while this one waited
            log.info("downloading %s: %s", source.path, gib(sum(file.size for file in files)))
            folder = source.store.download(files, root / source.key)
            for file in files:
                _verify(folder / file.name, file, source.store.digests(file))
            record.write_text(str(folder))
    return folder


def _whole_folder(record: Path, files: Sequence[RemoteFile]) -> Path | None:
    """Return the folder that the file `record` names; None if there is no such folder with files of the right sizes."""
    try:
        folder = Path(record.read_text())
        is_whole = all((folder / file.name).stat().st_size == file.size for file in files)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return folder if is_whole else None


def _verify(path: Path, file: RemoteFile, expected: dict[str, str]) -> None:
    """Remove a file and raise UserError if its size or a digest is wrong. expected: algorithm -> digest."""
    wrong = [name for name, digest in expected.items() if file_digest(path, name) != digest]
    if path.stat().st_size != file.size or wrong:
        path.resolve().unlink()  # in the hub's cache, `path` is a link to the content
        path.unlink(missing_ok=True)
        problem = f"its {wrong[0]} is not the store's" if wrong else f"it should have {file.size:,} bytes"
        raise UserError(f"{path}: damaged in the download: {problem}; the same command downloads it again")
