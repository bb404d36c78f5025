"""The POST at the end of a run: what it says, when it is tried again, that it fails no job and shows no URL."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.cli import notify
from pipeline.cli.app import app
from pipeline.cli.notify import TRIES, post
from pipeline.config.job import JobConfig
from pipeline.config.load import validated

SECRET = "planted-hook-secret"


class Hook:
    """A server that keeps what is posted. answers: status of each POST, the last of all others; slow: seconds."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.answers = [200]
        self.slow = 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Content-Type"] == "application/json" and SECRET in self.path
                hook.posted.append(body)
                time.sleep(hook.slow)
                status = hook.answers[min(len(hook.posted), len(hook.answers)) - 1]
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hooks/{SECRET}"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(notify, "WAIT_SECONDS", 0.01)
    one = Hook()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield one
    one.server.shutdown()
    one.server.server_close()


def job(folder: Path, checkpoint: Path, **changes: Any) -> Path:
    pq.write_table(pa.table({"id": [1, 2], "prompt": ["alpha", None]}), folder / "in.parquet")
    values = {
        "input": {"path": str(folder / "in.parquet"), "id": "id"},
        "output": {"path": str(folder / "out")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 4},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump({**values, **changes}))
    return folder / "job.yaml"


def test_a_finished_run_posts_its_summary_and_a_failed_one_why(
    hook: Hook, in_process: None, tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(job(tmp_path, checkpoint, notify={"url": hook.url}, max_error_rate=1.0))
    done = CliRunner().invoke(app, ["run", file, "--json"])
    assert done.exit_code == 0, done.output
    failed = CliRunner().invoke(app, ["run", file, "--set", "max_error_rate=0"])
    wrong = CliRunner().invoke(app, ["run", file, "--set", "input.path=/nowhere"])
    first, second, third = hook.posted
    assert first == {
        "text": f"skipdecode: succeeded: {tmp_path}/out",
        "status": "succeeded",
        "exit_status": 0,
        "output": f"{tmp_path}/out",
        "summary": json.loads(done.stdout.splitlines()[-1]),
    }
    assert (second["status"], second["exit_status"], failed.exit_code) == ("too many row errors", 3, 3)
    assert "1 of 2 rows have an error" in second["text"] and second["summary"]["errors"] == 1
    assert (third["status"], third["exit_status"], third["summary"]) == ("failed", 2, None)
    assert "/nowhere" in third["text"] and third["text"] in wrong.stderr
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    shown = done.output + failed.output + wrong.output + caplog.text
    assert SECRET not in shown and not any(SECRET.encode() in data for data in written)


@pytest.mark.parametrize(
    ("answers", "posts", "warning"),
    [
        ([503, 429, 204], 3, ""),
        ([500], TRIES, "HTTP status 500"),
        ([404], 1, "HTTP status 404"),
        ([302], 1, "HTTP status 302"),
    ],
)
def test_temporary_refusals_are_tried_again(
    hook: Hook, answers: list[int], posts: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook.answers = answers
    with caplog.at_level(logging.WARNING):
        post(hook.url, {"text": "x"})
    assert len(hook.posted) == posts and SECRET not in caplog.text
    assert caplog.text == "" if not warning else f"could not be posted to host 127.0.0.1: {warning}" in caplog.text


@pytest.mark.parametrize("server", ["slow", "absent"])
def test_a_server_that_does_not_answer_costs_little_and_fails_nothing(
    server: str, hook: Hook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "TRY_SECONDS", 0.1)
    hook.slow = 1.0
    began = time.monotonic()
    post(hook.url if server == "slow" else f"http://127.0.0.1:1/{SECRET}", {"text": "x"})
    assert time.monotonic() - began < 5
    assert "could not be posted to host 127.0.0.1: " in caplog.text and SECRET not in caplog.text


def test_the_address_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "m"}}

    def config(**settings: Any) -> JobConfig:
        return validated(JobConfig, {**values, "notify": settings}, "job.yaml")

    given = config(url_variable="HOOK").notify
    assert given is not None
    with pytest.raises(UserError, match="environment variable HOOK is not set"):
        given.address()
    monkeypatch.setenv("HOOK", SECRET)
    with pytest.raises(UserError, match="HOOK must be a URL that begins with http") as refused:
        given.address()
    assert SECRET not in str(refused.value)
    monkeypatch.setenv("HOOK", f"https://host/{SECRET}")
    assert given.address() == f"https://host/{SECRET}"
    secret = config(url=f"https://host/{SECRET}")
    assert SECRET not in repr(secret) and SECRET not in secret.model_dump_json()
    for wrong in ({}, {"url": "https://host", "url_variable": "HOOK"}, {"url": f"ftp://{SECRET}"}, {"url": 5}):
        with pytest.raises(UserError, match="notify") as refused:
            config(**wrong)
        assert SECRET not in str(refused.value)
