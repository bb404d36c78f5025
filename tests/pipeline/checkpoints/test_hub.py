"""Checkpoints of a hub on loopback: pinned to a commit, downloaded by huggingface_hub, checked, one line if not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import REPO, Hub, running_hub

from actors.engine.model.weights import StoredTensor, folder_tensors
from pipeline.checkpoints.resolve import RemoteCheckpoint, ResolvedCheckpoint, fetch, resolve_checkpoint
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.storage.errors import StoreFailed

WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.push("main", {**files(checkpoint), "README.md": b"about it", "pytorch_model.bin": b"a pickle"})
        yield hub


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def find(revision: str = "main", pinned: ResolvedCheckpoint | None = None) -> ResolvedCheckpoint:
    stored = None if pinned is None else pinned.identity()
    return resolve_checkpoint(ModelConfig(path=f"{REPO}@{revision}"), StorageConfig(), stored)


def shapes(tensors: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def refusal(path: str) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        resolve_checkpoint(ModelConfig(path=path), StorageConfig())
    assert path in str(caught.value)
    return str(caught.value)


def test_a_branch_is_pinned_to_its_commit_without_the_weights(hub: Hub, checkpoint: Path) -> None:
    resolved = find()
    assert set(hub.downloads()) == {path.name for path in checkpoint.glob("*.json")}
    assert shapes(resolved.tensors()) == shapes(folder_tensors(checkpoint))
    assert WEIGHTS not in hub.downloads()  # its header alone
    identity = resolved.identity()
    assert (identity["commit"], identity["hub"]) == (hub.branches["main"], f"{REPO}@main")
    assert set(identity["files"]) == set(files(checkpoint))


def test_a_node_downloads_each_file_once(hub: Hub, checkpoint: Path) -> None:
    resolved = find()
    folder = fetch(resolved.source)
    assert files(folder) == files(checkpoint)  # no pickle, no model card
    assert sorted(hub.downloads()) == sorted(files(checkpoint))
    asked = len(hub.asked)
    assert fetch(resolved.source) == folder == fetch(resolved.source, weights=False)
    assert len(hub.asked) == asked  # not even a question


def test_a_moved_branch_is_another_checkpoint_but_not_for_a_job_that_has_begun(hub: Hub, checkpoint: Path) -> None:
    before = find()
    weights = bytearray((checkpoint / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    hub.push("main", {**files(checkpoint), WEIGHTS: bytes(weights)})
    after = find()
    assert before.identity()["commit"] != after.identity()["commit"]
    assert before.identity()["files"][WEIGHTS] != after.identity()["files"][WEIGHTS]
    resumed = find(pinned=before)
    assert resumed.identity() == before.identity()
    assert (fetch(resumed.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert (fetch(after.source) / WEIGHTS).read_bytes() == weights
    hub.branches["other"] = hub.branches["main"]
    assert find("other", pinned=before).identity()["commit"] == after.identity()["commit"]
    commit = before.identity()["commit"]
    assert find(commit).identity()["commit"] == commit


def test_weights_that_do_not_have_the_hubs_digest_are_refused(hub: Hub, checkpoint: Path) -> None:
    resolved = find()
    damaged = bytearray((checkpoint / WEIGHTS).read_bytes())
    damaged[-1] ^= 1
    hub.wrong[WEIGHTS] = bytes(damaged)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged in the download: its sha256 is not the store's"):
        fetch(resolved.source)
    assert hub.downloads().count(WEIGHTS) == 2
    hub.wrong.clear()
    assert (fetch(resolved.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()


def test_quantized_weights_on_the_hub_are_refused_before_they_are_fetched(hub: Hub, checkpoint: Path) -> None:
    config = {**json.loads((checkpoint / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
    hub.push("main", {**files(checkpoint), "config.json": json.dumps(config).encode()})
    assert "quantized weights (fp8) are not supported; give the bfloat16 checkpoint" in refusal(f"{REPO}@main")
    assert WEIGHTS not in hub.downloads()
    hub.push("main", {"config.json": b'{"model_type": "llama"}', "m.Q4_1.gguf": b"GGUF"})
    assert "m.Q4_1.gguf is GGUF: fetch it and convert it (skipdecode convert)" in refusal(f"{REPO}@main")


def test_a_missing_model_or_revision_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such model on the hub, or no access" in refusal("someone/else@main")
    assert "no such revision: give a branch, tag or commit" in refusal(f"{REPO}@v9")
    hub.gated = True
    assert "ask for access on the hub, and set HF_TOKEN" in refusal(f"{REPO}@main")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreFailed, match=rf"^{REPO}@main: the hub at http://127\.0\.0\.1:9 cannot be reached"):
        find()


def test_the_hub_travels_with_the_checkpoint(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node need not have HF_ENDPOINT in its environment."""
    resolved = find()
    assert isinstance(resolved.source, RemoteCheckpoint) and hash(resolved.source)
    monkeypatch.delenv("HF_ENDPOINT")
    assert files(fetch(resolved.source)) == files(checkpoint)
