"""Checkpoints from a bucket or a hub: pinned without their weights, fetched once, checked, never half of one."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from hub_server import REPO, Hub, running_hub
from transformers import AutoModelForCausalLM

from actors.engine.errors import UserError
from actors.engine.model.weights import StoredTensor, folder_tensors
from pipeline.checkpoints import stores as checkpoint_stores
from pipeline.checkpoints.resolve import RemoteCheckpoint, ResolvedCheckpoint, fetch, resolve_checkpoint
from pipeline.checkpoints.stores import BucketStore, RemoteFile
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.storage.errors import StoreFailed

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def sharded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in several shards, beside weights of other kinds that nobody may fetch."""
    folder = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder, max_shard_size="30KB")
    for path in checkpoint.iterdir():
        if path.suffix == ".json" and not (folder / path.name).exists():
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


@cache
def client_of(storage: StorageConfig) -> Any:
    return boto3.client("s3", endpoint_url=storage.endpoint_url)


def put(folder: Path, url: str, storage: StorageConfig, **extra: Any) -> str:
    client = client_of(storage)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes(), **extra)
    return url


def find(path: str, storage: StorageConfig | None = None) -> ResolvedCheckpoint:
    return resolve_checkpoint(ModelConfig(path=path), storage or StorageConfig())


def remote(resolved: ResolvedCheckpoint) -> RemoteCheckpoint:
    assert isinstance(resolved.source, RemoteCheckpoint)
    return resolved.source


def shapes(tensors: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def refusal(path: str, storage: StorageConfig | None = None) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        find(path, storage)
    assert path.removeprefix("./") in str(caught.value)
    return str(caught.value)


def flipped(path: Path) -> bytes:
    """The file with another last bit."""
    data = path.read_bytes()
    return data[:-1] + bytes([data[-1] ^ 1])


def held(place: Path) -> set[str]:
    """Names of the checkpoint files that lie in the cache, hidden ones too."""
    return {path.name for folder in place.iterdir() if folder.is_dir() for path in folder.iterdir()}


def test_a_local_folder_is_taken_as_it_is(
    checkpoint: Path, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = find(str(checkpoint))
    assert resolved.source == str(checkpoint) == str(fetch(resolved.source))
    assert not place.exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(checkpoint)
    (tmp_path / "owner" / "name@main").symlink_to(checkpoint)
    for path in ("owner/name", "owner/name@main"):  # a folder comes before the hub
        assert find(path).source == str(checkpoint)


def test_a_path_of_no_checkpoint_is_refused() -> None:
    said = refusal("owner/name")
    assert "owner/name: no such checkpoint folder in the current folder, " in said
    assert said.endswith("; for a model on the hub, add @revision, for example owner/name@main or owner/name@COMMIT")
    for path in ("nowhere", "a/b/c", "./owner/name"):
        assert refusal(path).endswith(f"no such checkpoint folder in the current folder, {os.getcwd()}")
    assert refusal("/nowhere/at/all").endswith("no such checkpoint folder")
    assert "local folder, s3:// or the hub" in refusal("gs://bucket/model")
    assert "s3://checkpoints/m.gguf: is a file" in refusal("s3://checkpoints/m.gguf")


def test_quantized_weights_in_a_bucket_are_refused_before_they_are_fetched(
    checkpoint: Path, s3: StorageConfig, place: Path
) -> None:
    url = put(checkpoint, "s3://bucket/quantized", s3)
    config = {**json.loads((checkpoint / "config.json").read_text()), "quantization_config": {"quant_method": "awq"}}
    client_of(s3).put_object(Bucket="bucket", Key="quantized/config.json", Body=json.dumps(config).encode())
    assert "quantized weights (awq) run only in vLLM: set model.engine: vllm" in refusal(url, s3)
    assert not any(name.endswith(".safetensors") for name in held(place))
    assert "s3://checkpoints/m.gguf: is a file" in refusal("s3://checkpoints/m.gguf", s3)


def test_planning_leaves_the_weights_in_the_bucket(checkpoint: Path, s3: StorageConfig, place: Path) -> None:
    resolved = find(put(checkpoint, "s3://bucket/plan/model", s3), s3)
    small = {path.name for path in checkpoint.glob("*.json")}
    assert held(place) == small
    assert (resolved.checkpoint.num_layers, resolved.checkpoint.spec) == (4, find(str(checkpoint)).checkpoint.spec)
    assert shapes(resolved.tensors()) == shapes(folder_tensors(checkpoint))
    assert fetch(resolved.source, weights=False) == resolved.checkpoint.path
    assert held(place) == small
    folder = fetch(resolved.source)
    assert files(folder) == files(checkpoint)


def test_a_sharded_checkpoint_is_fetched_by_its_index(sharded: Path, s3: StorageConfig, place: Path) -> None:
    resolved = find(put(sharded, "s3://bucket/sharded", s3) + "/", s3)  # with a slash or without
    wanted = {path.name for path in sharded.iterdir()} - {"pytorch_model.bin", "consolidated.safetensors"}
    assert set(resolved.identity()["files"]) == wanted
    assert shapes(resolved.tensors()) == shapes(folder_tensors(sharded))
    fetch(resolved.source)
    assert held(place) == wanted


def test_a_change_in_the_bucket_makes_another_checkpoint(checkpoint: Path, s3: StorageConfig, place: Path) -> None:
    url = put(checkpoint, "s3://bucket/changing", s3)
    before = find(url, s3)
    fetch(before.source)
    assert find(url, s3) == before
    weights = flipped(checkpoint / WEIGHTS)
    client_of(s3).put_object(Bucket="bucket", Key=f"changing/{WEIGHTS}", Body=weights)
    after = find(url, s3)
    assert before.identity() != after.identity()
    assert fetch(after.source) != fetch(before.source)  # the old one is still there, and still itself
    assert (fetch(before.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert (fetch(after.source) / WEIGHTS).read_bytes() == weights


def test_a_file_that_changed_after_the_plan_is_refused(checkpoint: Path, s3: StorageConfig, place: Path) -> None:
    url = put(checkpoint, "s3://bucket/changed", s3)
    resolved = find(url, s3)
    client_of(s3).put_object(Bucket="bucket", Key=f"changed/{WEIGHTS}", Body=flipped(checkpoint / WEIGHTS))
    with pytest.raises(ValueError, match=rf"^{url}/{WEIGHTS}: changed since the job was planned; restore it"):
        fetch(resolved.source)
    assert WEIGHTS not in held(place)


def test_simultaneous_fetches_are_one_download(
    checkpoint: Path, s3: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holder of a lock has its own file descriptor, so that threads exclude each other as processes do."""
    resolved = find(put(checkpoint, "s3://bucket/at-once", s3), s3)
    began, asked, original = threading.Event(), [], BucketStore.download

    def slow(store: BucketStore, files: Any, folder: Path) -> Path:
        asked.append(folder)
        began.set()
        threading.Event().wait(0.5)  # the others arrive
        return original(store, files, folder)

    monkeypatch.setattr(BucketStore, "download", slow)
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(lambda _: fetch(resolved.source), range(4)))
    assert began.is_set() and len(asked) == 1 and len(set(folders)) == 1


HANGS = """
import pickle, sys, threading
from pathlib import Path
from pipeline.checkpoints import stores as checkpoint_stores
from pipeline.checkpoints import resolve as checkpoints

def hang(store, file, folder):
    (folder / file.name).write_bytes(b"half")
    if file.name.endswith(".safetensors"):
        print("in the middle", flush=True)
        threading.Event().wait(600)

checkpoint_stores.BucketStore._get = hang
checkpoints.fetch(pickle.loads(bytes.fromhex(sys.argv[1])))
"""


def test_a_killed_download_leaves_nothing_that_counts(checkpoint: Path, s3: StorageConfig, place: Path) -> None:
    resolved = find(put(checkpoint, "s3://bucket/killed", s3), s3)
    source = pickle.dumps(resolved.source).hex()
    process = subprocess.Popen([sys.executable, "-c", HANGS, source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
    process.kill()
    process.wait()
    assert files(fetch(resolved.source)) == files(checkpoint)  # nor does its lock outlive it


def test_a_damaged_download_is_refused_and_removed(
    checkpoint: Path, s3: StorageConfig, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = find(put(checkpoint, "s3://bucket/damaged", s3), s3)
    original = BucketStore._get

    def flip(store: BucketStore, file: RemoteFile, folder: Path) -> None:
        original(store, file, folder)
        if file.name == WEIGHTS:
            (folder / file.name).write_bytes(flipped(folder / file.name))

    with monkeypatch.context() as patch:
        patch.setattr(BucketStore, "_get", flip)
        with pytest.raises(UserError, match=r"model\.safetensors: damaged in the download: its md5 is not the store's"):
            fetch(resolved.source)
    assert WEIGHTS not in held(place)
    folder = fetch(resolved.source)  # the failed fetch, whose error is still in use, does not hold the lock
    assert files(folder) == files(checkpoint)
    for damage in (lambda: (folder / WEIGHTS).write_bytes(b"short"), (folder / WEIGHTS).unlink):
        damage()
        assert fetch(resolved.source) == folder and files(folder) == files(checkpoint)


def test_digests_that_the_store_knows(checkpoint: Path, s3: StorageConfig) -> None:
    """MD5 where the ETag is one, SHA-256 where it was given; an upload in parts tells neither, and still comes."""
    put(checkpoint, "s3://bucket/told", s3, ChecksumAlgorithm="SHA256")
    store = BucketStore("s3://bucket/told", s3)
    file = next(file for file in store.files() if file.name == WEIGHTS)
    assert set(store.digests(file)) == {"md5", "sha256"}
    assert "md5" not in store.digests(replace(file, version="no md5"))
    client = client_of(s3)
    key = {"Bucket": "bucket", "Key": f"told/{WEIGHTS}"}
    upload = client.create_multipart_upload(**key)["UploadId"]
    part = client.upload_part(**key, UploadId=upload, PartNumber=1, Body=(checkpoint / WEIGHTS).read_bytes())
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(**key, UploadId=upload, MultipartUpload=parts)
    resolved = find("s3://bucket/told", s3)
    whole = next(file for file in remote(resolved).files if file.name == WEIGHTS)
    assert whole.version.endswith("-1") and store.digests(whole) == {}
    assert (fetch(resolved.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()


def test_weights_that_are_cut_short_in_the_bucket_are_known_before_loading(
    checkpoint: Path, s3: StorageConfig, tmp_path: Path
) -> None:
    put(checkpoint, "s3://bucket/short", s3)
    data = (checkpoint / WEIGHTS).read_bytes()[:-100]
    client_of(s3).put_object(Bucket="bucket", Key=f"short/{WEIGHTS}", Body=data)
    resolved = find("s3://bucket/short", s3)
    with pytest.raises(ValueError, match=rf"^s3://bucket/short/{WEIGHTS}: {len(data)} bytes, but its header says"):
        resolved.tensors()


def test_buckets_that_cannot_be_read_are_one_line(
    checkpoint: Path, s3: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "s3://nobody-has-this: no such bucket" in refusal("s3://nobody-has-this/model", s3)
    assert "no such" in refusal("s3://bucket/nothing/here", s3)
    closed = StorageConfig(endpoint_url="http://127.0.0.1:9", retry_seconds=0)
    with pytest.raises(StoreFailed, match=r"^s3://bucket/model/?: the store .*fail.*Could not connect"):
        find("s3://bucket/model", closed)
    client_of(s3).put_object(Bucket="bucket", Key="odd/README.md", Body=b"x")
    said = refusal("s3://bucket/odd", s3)
    assert said == "s3://bucket/odd: not a checkpoint: no config.json; give the folder of a checkpoint"
    resolved = find(put(checkpoint, "s3://bucket/full", s3), s3)
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(checkpoint_stores.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"left: free some space, or set model\.cache"):
        fetch(resolved.source)


def test_a_job_may_say_where_the_cache_is(checkpoint: Path, s3: StorageConfig, tmp_path: Path, place: Path) -> None:
    url = put(checkpoint, "s3://bucket/elsewhere", s3)
    resolved = resolve_checkpoint(ModelConfig(path=url, cache=str(tmp_path / "there")), s3)
    assert fetch(resolved.source).is_relative_to(tmp_path / "there") and not place.exists()
    assert resolved.identity() == find(url, s3).identity()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot hold checkpoints: .*; set model\.cache"):
        resolve_checkpoint(ModelConfig(path=url, cache=str(tmp_path / "file")), s3)


@pytest.fixture
def hub(checkpoint: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.push("main", {**files(checkpoint), "README.md": b"about it", "pytorch_model.bin": b"a pickle"})
        yield hub


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of_hub(revision: str = "main", pinned: ResolvedCheckpoint | None = None) -> ResolvedCheckpoint:
    stored = None if pinned is None else pinned.identity()
    return resolve_checkpoint(ModelConfig(path=f"{REPO}@{revision}"), StorageConfig(), stored)


def test_a_branch_is_pinned_to_its_commit_without_the_weights(hub: Hub, checkpoint: Path) -> None:
    resolved = of_hub()
    assert set(hub.downloads()) == {path.name for path in checkpoint.glob("*.json")}
    assert shapes(resolved.tensors()) == shapes(folder_tensors(checkpoint))
    assert WEIGHTS not in hub.downloads()  # its header alone
    identity = resolved.identity()
    assert (identity["commit"], identity["hub"]) == (hub.branches["main"], f"{REPO}@main")
    assert set(identity["files"]) == set(files(checkpoint))


def test_a_node_downloads_each_file_once(hub: Hub, checkpoint: Path) -> None:
    resolved = of_hub()
    folder = fetch(resolved.source)
    assert files(folder) == files(checkpoint)  # no pickle, no model card
    assert sorted(hub.downloads()) == sorted(files(checkpoint))
    asked = len(hub.asked)
    assert fetch(resolved.source) == folder == fetch(resolved.source, weights=False)
    assert len(hub.asked) == asked  # not even a question


def test_a_moved_branch_is_another_checkpoint_but_not_for_a_job_that_has_begun(hub: Hub, checkpoint: Path) -> None:
    before = of_hub()
    weights = flipped(checkpoint / WEIGHTS)
    hub.push("main", {**files(checkpoint), WEIGHTS: weights})
    after = of_hub()
    assert before.identity()["commit"] != after.identity()["commit"]
    assert before.identity()["files"][WEIGHTS] != after.identity()["files"][WEIGHTS]
    resumed = of_hub(pinned=before)
    assert resumed.identity() == before.identity()
    assert (fetch(resumed.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    assert (fetch(after.source) / WEIGHTS).read_bytes() == weights
    hub.branches["other"] = hub.branches["main"]
    assert of_hub("other", pinned=before).identity()["commit"] == after.identity()["commit"]
    commit = before.identity()["commit"]
    assert of_hub(commit).identity()["commit"] == commit


def test_weights_that_do_not_have_the_hubs_digest_are_refused(hub: Hub, checkpoint: Path) -> None:
    resolved = of_hub()
    hub.wrong[WEIGHTS] = flipped(checkpoint / WEIGHTS)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged in the download: its sha256 is not the store's"):
        fetch(resolved.source)
    hub.wrong.clear()
    assert (fetch(resolved.source) / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()


def test_quantized_weights_on_the_hub_are_refused_before_they_are_fetched(hub: Hub, checkpoint: Path) -> None:
    config = {**json.loads((checkpoint / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
    hub.push("main", {**files(checkpoint), "config.json": json.dumps(config).encode()})
    assert "quantized weights (fp8) run only in vLLM" in refusal(f"{REPO}@main")
    assert WEIGHTS not in hub.downloads()
    hub.push("main", {"config.json": b'{"model_type": "llama"}', "m.Q4_1.gguf": b"GGUF"})
    assert "m.Q4_1.gguf is GGUF, which is not loaded: give the publisher's safetensors" in refusal(f"{REPO}@main")


def test_a_missing_model_or_revision_is_one_line(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such model on the hub, or no access" in refusal("someone/else@main")
    assert "no such revision: give a branch, tag or commit" in refusal(f"{REPO}@v9")
    hub.gated = True
    assert "ask for access on the hub, and set HF_TOKEN" in refusal(f"{REPO}@main")
    hub.gated = False
    place.mkdir(parents=True)
    (place / "hub").touch()
    with pytest.raises(
        ValueError, match=rf"^{place}/hub: cannot hold {REPO}@\w+: .* Not a directory.*set model.cache$"
    ):
        of_hub()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreFailed, match=rf"^{REPO}@main: the hub at http://127\.0\.0\.1:9 cannot be reached"):
        of_hub()


def test_the_hub_travels_with_the_checkpoint(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node need not have HF_ENDPOINT in its environment."""
    resolved = of_hub()
    assert isinstance(resolved.source, RemoteCheckpoint) and hash(resolved.source)
    monkeypatch.delenv("HF_ENDPOINT")
    assert files(fetch(resolved.source)) == files(checkpoint)
