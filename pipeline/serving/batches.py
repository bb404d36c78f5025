"""Batches as jobs: each runs `skipdecode run` over its file in a process of its own, which resumes after a restart.

created ─ validating ─ in_progress ─ finalizing ─ completed
                 └ failed       └ cancelling ─ cancelled
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.openai_requests import ENDPOINTS
from pipeline.config.job import JobConfig
from pipeline.config.load import dump_yaml
from pipeline.messages import without_secrets
from pipeline.serving.store import Store

RUN = (sys.executable, "-m", "pipeline", "run")
OK, ROW_ERRORS, LEASE_HELD = 0, 3, 5  # exit statuses of the job
INTERRUPTED = (4, -signal.SIGTERM)  # the latter before the job handles signals
HELD_SECONDS = 30.0  # before a job is started again whose output another run holds
MOST_ERRORS = 10  # of a file that are listed
ENDED = ("completed", "failed", "cancelled")
JobOf = Callable[[str, str], JobConfig]  # (file of requests, folder for answers) -> job


class BatchRunner:
    """Runs batches, oldest first, `at_once` at the same time.

    Args:
        store: Files and batches; those that an earlier server has not finished are run again, and resume.
        job: The job of a batch.
        at_once: Batches that run at the same time.
        environment: Variables of the job's process, such as the cluster's address.
        command: What runs a job file.
    """

    def __init__(
        self,
        store: Store,
        job: JobOf,
        at_once: int,
        environment: Mapping[str, str],
        command: Sequence[str] = RUN,
    ) -> None:
        self.store, self._job, self._command = store, job, tuple(command)
        self._environment = {**os.environ, **environment}
        self._changed = threading.Condition()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._closed = False
        self._waiting = [one["id"] for one in reversed(store.batches()) if one["status"] not in ENDED]
        self._threads = [threading.Thread(target=self._work, name="batches", daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def create(self, file: str, endpoint: str, window: str, metadata: Any) -> dict[str, Any]:
        """A new batch over an uploaded file; it runs when its turn comes. FileNotFoundError if the file is gone."""
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "cancelling_at", "cancelled_at")
        record = {
            "id": self.store.new_id("batch"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file,
            "completion_window": window,
            "status": "validating",
            "created_at": int(time.time()),
            "metadata": metadata,
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **dict.fromkeys((*times, "expires_at", "expired_at")),
        }
        self.store.link_requests(file, record["id"])
        with self._changed:
            self.store.save_batch(record)
            self._waiting.append(record["id"])
            self._changed.notify_all()
        return record

    def cancel(self, key: str) -> dict[str, Any] | None:
        """Stop a batch; what it has answered can be fetched. None if there is no such batch."""
        with self._changed:
            record = self.store.batch(key)
            if record is None or record["status"] in ENDED or record["status"] == "cancelling":
                return record
            record = self._save(record, "cancelling")
            if key in self._waiting:
                self._waiting.remove(key)
                return self._save(record, "cancelled")
            if key in self._running:
                self._running[key].send_signal(signal.SIGTERM)
            self._changed.notify_all()
        return record

    def close(self) -> None:
        """Stop the jobs at work; another server finishes them."""
        with self._changed:
            self._closed = True
            for process in self._running.values():
                process.send_signal(signal.SIGTERM)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(60)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                key = self._waiting.pop(0)
            try:
                self._run(key)
            except Exception as error:  # one batch must not end the others
                self._fail(key, f"{type(error).__name__}: {error}")

    def _run(self, key: str) -> None:
        record = self.store.batch(key)
        assert record is not None
        if record["status"] == "cancelling":
            self._save(record, "cancelled")
            return
        folder, requests = self.store.batch_folder(key), self.store.requests(key)
        total, errors = check_lines(requests, record["endpoint"])
        if errors:
            with self._changed:
                self._save({**record, "errors": {"object": "list", "data": errors}}, "failed")
            return
        output, job = folder / "answers", folder / "job.yaml"
        job.write_text(dump_yaml(self._job(str(requests), str(output)).model_dump(mode="json", exclude_none=True)))
        while (process := self._start(key, job, total)) is not None:
            said, _ = process.communicate()
            with self._changed:
                del self._running[key]
                if process.returncode != LEASE_HELD:
                    self._end(key, process.returncode, said, output, folder / "log")
                    return
                # the job that an earlier server started is at work, as that server was killed
                self._changed.wait_for(lambda: self._closed or self._is_cancelling(key), HELD_SECONDS)

    def _start(self, key: str, job: Path, total: int) -> subprocess.Popen[str] | None:
        """The process of a batch in progress; None if the batch is cancelled, or the server stops."""
        with self._changed, open(job.parent / "log", "a") as log:
            record = self.store.batch(key)
            assert record is not None
            if record["status"] == "cancelling":
                self._save(record, "cancelled")
                return None
            if self._closed:
                return None
            if record["status"] != "in_progress":
                counts = {**record["request_counts"], "total": total}
                self._save({**record, "request_counts": counts}, "in_progress")
            self._running[key] = process = subprocess.Popen(
                [*self._command, str(job), "--json"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        return process

    def _is_cancelling(self, key: str) -> bool:
        record = self.store.batch(key)
        return record is not None and record["status"] == "cancelling"

    def _end(self, key: str, status: int, said: str, output: Path, log: Path) -> None:
        record = self.store.batch(key)
        assert record is not None
        if self._closed and status in INTERRUPTED:
            return
        if record["status"] == "cancelling" and status in INTERRUPTED:
            self._save(record, "cancelled")
            return
        if status not in (OK, ROW_ERRORS):
            lines = log.read_text(errors="replace").strip().splitlines() or [f"exit status {status}"]
            self._fail(key, without_secrets(lines[-1]))
            return
        record = self._save(record, "finalizing")
        summary = json.loads(said.strip().splitlines()[-1])
        failed = int(summary["errors"])
        record["request_counts"] = {
            "total": record["request_counts"]["total"],
            "completed": record["request_counts"]["total"] - failed,
            "failed": failed,
        }
        for name, field in (("results", "output_file_id"), ("errors", "error_file_id")):
            parts = sorted(output.glob(f"{name}*.jsonl"))
            if len(parts) > 1:  # a large result is several files
                whole = output.parent / f"{name}.jsonl"
                with open(whole, "wb") as target:
                    for part in parts:
                        target.write(part.read_bytes())
                parts = [whole]
            record[field] = self.store.link_result(parts[0]) if parts else None
        self._save(record, "completed")

    def _fail(self, key: str, message: str) -> None:
        record = self.store.batch(key)
        assert record is not None
        error = {"code": "job_failed", "message": message, "line": None, "param": None}
        self._save({**record, "errors": {"object": "list", "data": [error]}}, "failed")

    def _save(self, record: dict[str, Any], status: str) -> dict[str, Any]:
        record = {**record, "status": status}
        if status != "validating":
            record[f"{status}_at"] = int(time.time())
        self.store.save_batch(record)
        return record


def check_lines(source: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests in a file, and the first of its lines that no batch may have."""
    errors: list[dict[str, Any]] = []
    ids: set[str] = set()
    total = 0

    def wrong(number: int, code: str, message: str, param: str | None = None) -> None:
        if len(errors) < MOST_ERRORS:
            errors.append({"code": code, "message": message, "line": number, "param": param})

    with open(source, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            total += 1
            request: Any = None
            with suppress(ValueError, RecursionError):
                request = json.loads(line)
            if not isinstance(request, dict):
                wrong(number, "invalid_json_line", "the line is no JSON object")
                continue
            if request.get("url") != endpoint:
                wrong(number, "mismatched_url", f"url is {str(request.get('url'))[:100]!r}, not {endpoint!r}", "url")
            key = request.get("custom_id")
            if not isinstance(key, str):
                wrong(number, "missing_required_parameter", "custom_id is missing", "custom_id")
            elif key in ids:
                wrong(number, "duplicate_custom_id", f"custom_id {key[:100]!r} comes twice", "custom_id")
            else:
                ids.add(key)
    if not total:
        wrong(0, "empty_file", "the file has no requests")
    return total, errors


def is_endpoint(url: Any) -> bool:
    """Whether batches may name it."""
    return url in ENDPOINTS
