from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from pipeline.checkpoints import progress


def test_a_download_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert progress.FIRST_SECONDS < 2 and progress.SECONDS == 10
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    (tmp_path / "earlier").write_bytes(bytes(2**20))
    with caplog.at_level(logging.INFO), progress.download_progress("s3://b/m", 4 * 2**20, tmp_path):
        (tmp_path / ".part.incomplete").write_bytes(bytes(2**21))
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.messages[1] == "downloading s3://b/m: 2 MiB of 4 MiB"


def test_progress_may_go_to_a_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    arrived = threading.Event()
    with progress.download_progress("s3://b/m", 2**20, tmp_path, report=lambda line: arrived.set()):
        assert arrived.wait(10)


def test_a_short_download_reports_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), progress.download_progress("s3://b/m", 10, tmp_path / "none"):
        pass
    assert caplog.messages == []
