"""Whole jobs in the process of a test: every stage is real, there is no Ray."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from pipeline import job as jobs
from pipeline.answer.coordinator import Coordinator, Workload
from pipeline.answer.stage import Worker
from pipeline.cli.app import app
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.report.summary import JobResult
from pipeline.run import stages
from pipeline.run.stages import Backend, Stages
from pipeline.runtime.signals import Interrupted, graceful


class InProcess(Backend):
    """Backend of one process: one actor with its threads, no retries. A row that kills the process kills the caller."""

    def session(self, actors: ActorsConfig, output: str) -> AbstractContextManager[InProcessSession]:
        return nullcontext(InProcessSession())


class InProcessSession:
    """See `Session`."""

    def __init__(self) -> None:
        self.coordinator, self.worker = Coordinator(), Worker()

    def run(self, stages: Stages, workload: Workload, grace_seconds: float) -> None:
        generator, running = stages.generator(**stages.arguments), deque[Future[Any]]()
        with (
            graceful(grace_seconds, self.coordinator.stop, self.coordinator.working) as grace,
            ThreadPoolExecutor(stages.calls) as calls,
        ):
            for batch in self._batches(stages):
                running.append(calls.submit(generator, batch))
                if len(running) == stages.calls:
                    running.popleft().result()
            for call in running:
                call.result()
        if grace.signal is not None:
            raise Interrupted(grace.signal)

    def _batches(self, stages: Stages) -> Iterator[dict[str, Any]]:
        for block in stages.prepare(stages.shards, stages.files):
            if self.coordinator.stopped:
                return
            yield {name: block[name].to_numpy() for name in block.column_names}


def job_values(path: Path | str, output: Path | str, checkpoint: Path | str, /, **changes: Any) -> dict[str, Any]:
    """The file of a small job. changes: by key; those of a section are added to the section's."""
    values: dict[str, Any] = {
        "input": {"path": str(path)},
        "output": {"path": str(output)},
        "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "sampling": {"max_new_tokens": 6},
        "actors": {"threads": 1},
        "max_error_rate": 1.0,
    }
    for name, change in changes.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return values


def job_config(path: Path | str, output: Path | str, checkpoint: Path | str, /, **changes: Any) -> JobConfig:
    """`job_values` as a model."""
    return JobConfig.model_validate(job_values(path, output, checkpoint, **changes))


def run_in_process(config: JobConfig, **options: Any) -> JobResult:
    """`pipeline.job.run` on the in-process backend."""
    return jobs.run(config, backend=InProcess(), **options)


def invoke(folder: Path, job: dict[str, Any] | JobConfig, *options: str, command: str = "run") -> Result:
    """Call a command over a job in this process. The job's file is `folder`/job.yaml."""
    values = job.model_dump(exclude_none=True) if isinstance(job, JobConfig) else job
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    return CliRunner().invoke(app, [command, str(folder / "job.yaml"), *options])


def report(output: Path | str, *options: str) -> Result:
    """Call `skipdecode report` in this process."""
    return CliRunner().invoke(app, ["report", str(output), *options], env={"COLUMNS": "40"})


def files_of(folder: Path | str) -> dict[str, tuple[int, int, bytes]]:
    """Inode, modification time and bytes of every file below a folder."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def answered_rows(output: Path) -> list[dict[str, Any]]:
    """The rows of all parts, in order."""
    return [row for part in sorted(output.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


def parts(output: Path) -> dict[str, bytes]:
    """The bytes of the parts."""
    return {path.name: path.read_bytes() for path in sorted(output.glob("part-*.parquet"))}


def run_and_read(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a job answers. values: of its file."""
    config = JobConfig.model_validate(values)
    run_in_process(config)
    return answered_rows(Path(config.output.path))


def run_interrupted(monkeypatch: pytest.MonkeyPatch, config: JobConfig) -> None:
    """Run a job whose process gets SIGTERM while the first shard is committed."""
    commit_shard = stages.commit_shard

    def signalled(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(stages, "commit_shard", commit_shard)
        os.kill(os.getpid(), signal.SIGTERM)
        return commit_shard(*arguments, **named)

    monkeypatch.setattr(stages, "commit_shard", signalled)
    with pytest.raises(Interrupted):
        run_in_process(config)
