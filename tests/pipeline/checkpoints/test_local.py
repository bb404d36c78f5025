"""Local checkpoints: digests computed once, nodes that see other files, and nothing in one is run or leads outside."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.errors import UserError
from actors.engine.model import file_digests
from actors.engine.model.loading import inspect, load_decoder
from actors.engine.model.tokenizer import load_tokenizer
from pipeline.checkpoints import local
from pipeline.checkpoints.resolve import fetch, resolve_checkpoint
from pipeline.checkpoints.stores import BucketStore
from pipeline.config.job import ModelConfig, StorageConfig

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny checkpoint, written a minute ago."""
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    for path in copy.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60))
    return copy


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed."""
    names: list[str] = []
    original = file_digests.file_digest

    def record(path: Path, algorithm: str) -> str:
        names.append(path.name)
        return original(path, algorithm)

    monkeypatch.setattr(file_digests, "file_digest", record)
    return names


def test_a_cache_without_a_home_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", "~no-such-user/cache")
    with pytest.raises(UserError, match=r"^~no-such-user/cache: no home folder is known; set HOME"):
        file_digests.digests(folder)


def test_weights_are_hashed_again_if_they_have_another_size_time_or_inode(folder: Path, hashed: list[str]) -> None:
    first = file_digests.digests(folder)
    assert set(first) == {path.name for path in folder.iterdir()}
    assert file_digests.digests(folder) == first and hashed.count(WEIGHTS) == 1
    weights = folder / WEIGHTS
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    (folder / "new").write_bytes(data)
    os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (folder / "new").replace(weights)  # same size and time, another inode
    second = file_digests.digests(folder)
    assert second[WEIGHTS] != first[WEIGHTS]
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_digests.digests(folder) == second and hashed.count(WEIGHTS) == 3


def test_weights_that_were_just_written_are_not_remembered(folder: Path, hashed: list[str]) -> None:
    os.utime(folder / WEIGHTS)
    file_digests.digests(folder)
    file_digests.digests(folder)
    assert hashed.count(WEIGHTS) == 2


def test_a_damaged_or_unwritable_cache_costs_only_time(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    first = file_digests.digests(folder)
    (record,) = (tmp_path / "cache" / "digests").iterdir()
    for text in ("{", "[" * 100_000, "[]", '{"model.safetensors": 3}'):
        record.write_text(text)
        assert file_digests.digests(folder) == first
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")
    assert file_digests.digests(folder) == first and hashed.count(WEIGHTS) == 6


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_node_with_another_copy_at_the_same_path_is_refused(folder: Path, name: str) -> None:
    pinned = resolve_checkpoint(ModelConfig(path=str(folder)), StorageConfig()).pinned()
    assert fetch(pinned) == folder
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"^{folder}/{name}: the file differs from that on the host that planned"):
        fetch(pinned)
    if name == WEIGHTS:
        assert fetch(pinned, weights=False) == folder
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"^{folder}/{name}: the file is missing, but exists on the host that planned"):
        fetch(pinned)


def test_large_weights_are_compared_by_size_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SAMPLE_BYTES", 100)
    path = tmp_path / WEIGHTS
    data = bytearray((300).to_bytes(8, "little") + bytes(1000))
    path.write_bytes(data)
    pinned = local.pin(tmp_path)
    for place, seen in ((0, True), (50, True), (1000, True), (600, False)):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        if seen:
            with pytest.raises(UserError, match="differs from"):
                local.check_same(pinned, weights=True)
        else:
            local.check_same(pinned, weights=True)
    path.write_bytes(data + b"x")
    with pytest.raises(UserError, match="differs from"):
        local.check_same(pinned, weights=True)


PICKLES = [
    "pytorch_model.bin",
    "training_args.bin",
    "optimizer.pt",
    "tokenizer.pkl",
    "adapter_model.bin",
    "rng_state.pth",
]


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return Path.touch, (self.sprung,)


def copied(checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    return folder


def load(folder: Path) -> None:
    """All that a job loads of a checkpoint."""
    resolve_checkpoint(ModelConfig(path=str(folder)), StorageConfig())
    load_tokenizer(folder)
    load_decoder(folder, torch.float32, torch.device("cpu"))


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_pickles_in_the_folder_are_never_loaded(checkpoint: Path, tmp_path: Path) -> None:
    folder, sprung = copied(checkpoint, tmp_path), tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))
    pickle.loads(trap)
    assert sprung.exists()  # the trap works
    sprung.unlink()
    for name in PICKLES:
        (folder / name).write_bytes(trap)
    load(folder)
    assert not sprung.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no safetensors weights .* is a pickle, which is not loaded"):
        load(folder)
    with pytest.raises((OSError, ValueError)):  # past our own check, too
        load_decoder(folder, torch.float32, torch.device("cpu"))
    assert not sprung.exists()


def test_code_in_a_checkpoint_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    folder, sprung = copied(checkpoint, tmp_path), tmp_path / "sprung"
    (folder / "own.py").write_text(f"open({str(sprung)!r}, 'w')\nclass Own: ...\n")
    changed(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")
    with contextlib.suppress(ValueError):
        load_tokenizer(folder)
    assert not sprung.exists()
    shutil.copy(checkpoint / "tokenizer_config.json", folder)
    changed(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    with pytest.raises(ValueError, match=r"asks to run code of the checkpoint \(auto_map\), which is never done"):
        load(folder)
    with contextlib.suppress(ValueError):
        load_decoder(folder, torch.float32, torch.device("cpu"))  # past our own check, too
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json"])
@pytest.mark.parametrize("text", ["[]", "3", "null", '"auto_map"', "{", "\xff", "{}", "[" * 3000])
def test_files_that_hold_something_else_are_one_line(checkpoint: Path, tmp_path: Path, name: str, text: str) -> None:
    from pipeline.prepare.tokenizer import tokenizer_of

    folder = copied(checkpoint, tmp_path)
    if name == "adapter_config.json":
        (folder / "config.json").unlink()
    (folder / name).write_bytes(text.encode("latin-1"))
    try:
        resolve_checkpoint(ModelConfig(path=str(folder)), StorageConfig())
        tokenizer_of(str(folder))
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = f"{folder}: taken"
        assert name == "tokenizer_config.json" and text == "{}"
    assert str(folder) in refusal
    assert len(refusal.splitlines()) == 1
    assert ("the tokenizer cannot be loaded: " in refusal) == ((name, text) == ("tokenizer.json", "{}"))


@pytest.mark.parametrize("shard", ["../../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "x.bin", 3])
def test_an_index_cannot_name_another_folder(checkpoint: Path, tmp_path: Path, shard: Any) -> None:
    folder = copied(checkpoint, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match=r"index\.json: names .* no safetensors file in its folder: "):
        inspect(folder)


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json"])
def test_a_bucket_that_lists_a_way_out_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Lying:
        def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
            return [{"name": f"{path}/{name}", "type": "file", "size": 1, "ETag": '"e"'}]

    monkeypatch.setattr("pipeline.checkpoints.stores.filesystem", lambda url, storage: (Lying(), "bucket/model"))
    with pytest.raises(ValueError, match=r"^s3://bucket/model: the bucket lists '.*evil.json', which cannot be a file"):
        BucketStore("s3://bucket/model", StorageConfig()).files()
