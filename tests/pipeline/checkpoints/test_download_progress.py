from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from part_builders import Commits, part_spec, shard_generator

from pipeline.checkpoints import resolve as stores
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.checkpoints.stores import BucketStore
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.generate.coordinator import Coordinator
from pipeline.storage.folder import open_folder


def test_a_download_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert stores.FIRST_SECONDS < 2 and stores.SECONDS == 10
    monkeypatch.setattr(stores, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(stores, "SECONDS", 0.05)
    (tmp_path / "earlier").write_bytes(bytes(2**20))
    with caplog.at_level(logging.INFO), stores.download_progress("s3://b/m", 4 * 2**20, tmp_path):
        (tmp_path / ".part.incomplete").write_bytes(bytes(2**21))
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages[1] == "downloading s3://b/m: 2 MiB of 4 MiB"


def test_a_short_download_reports_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), stores.download_progress("s3://b/m", 10, tmp_path / "none"):
        pass
    assert caplog.messages == []


def test_an_actor_reports_its_download_to_the_coordinator(
    checkpoint: Path, s3: StorageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_folder("s3://bucket/download", s3)
    for path in checkpoint.iterdir():
        bucket.replace(path.name, path.read_bytes())
    model = ModelConfig(path=bucket.url, cache=str(tmp_path / "cache"))
    source = resolve_checkpoint(model, s3).pinned()
    lines: list[str] = []

    class Recorder(Coordinator):
        def downloading(self, actor: str | None, line: str) -> None:
            lines.append(line)

    original = BucketStore.download

    def wait_for_a_line(store: BucketStore, files: Any, folder: Path) -> Path:
        while not lines:
            time.sleep(0.01)
        return original(store, files, folder)

    monkeypatch.setattr(stores, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(BucketStore, "download", wait_for_a_line)
    coordinator = Recorder()
    settings = {"checkpoint": source, "dtype": "float32", "threads": 1}
    shard_generator(settings, part_spec(), Commits(), coordinator=coordinator)
    assert lines[0].startswith(f"downloading {bucket.url}: 0 MiB of ") and coordinator.read().loading == 0
