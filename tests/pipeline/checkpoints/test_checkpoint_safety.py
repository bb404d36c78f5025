"""A checkpoint is data: nothing in it is unpickled or run, and none of its names leads out of its folder."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.model.loading import inspect, load_decoder, load_tokenizer
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.checkpoints.stores import BucketStore
from pipeline.config.job import ModelConfig, StorageConfig

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
