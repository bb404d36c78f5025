"""Local checkpoints: digests that are computed once, and nodes that see other files at the same path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from actors.engine.errors import UserError
from actors.engine.model import file_digests
from pipeline.checkpoints import local
from pipeline.checkpoints.resolve import fetch, resolve_checkpoint
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
