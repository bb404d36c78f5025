"""Whole jobs on the in-process backend, without Ray: overlapping runs, a lost lease, an output that an actor misses."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import wait_until
from in_process import job_config, parts, run_in_process

from actors.engine.errors import UserError
from pipeline import job
from pipeline.commit.lease import LeaseHeld, LeaseLost
from pipeline.commit.sink import check_output
from pipeline.config.job import JobConfig
from pipeline.run import stages

ROWS = 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prompts: list[str | None] = [" ".join(["alpha", "bravo", "cheap"][: 1 + row % 3]) for row in range(ROWS)]
    prompts[5], prompts[13] = None, "alpha " * 200
    for number, (first, end) in enumerate(((0, 15), (15, ROWS))):
        ids = [f"row-{row}" for row in range(first, end)]
        pq.write_table(pa.table({"id": ids, "prompt": prompts[first:end]}), folder / f"in-{number}.parquet")
    return folder


def config(inputs: Path, output: Path, checkpoint: Path) -> JobConfig:
    sampling = {"temperature": 1.0, "seed": 5}
    return job_config(
        inputs, output, checkpoint, input={"id": "id"}, output={"token_ids": True}, sampling=sampling, shard_rows=6
    )


@pytest.mark.parametrize("same", [True, False])
def test_another_run_that_began_and_finished_while_this_one_was_planned(
    inputs: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    plan, this = job.plan, config(inputs, tmp_path / "out", checkpoint)
    other = this if same else this.model_copy(update={"sampling": this.sampling.model_copy(update={"seed": 6})})

    def slow_plan(*arguments: Any, **options: Any) -> Any:
        planned = plan(*arguments, **options)
        monkeypatch.undo()
        run_in_process(other)
        return planned

    monkeypatch.setattr(job, "plan", slow_plan)
    error, message = (LeaseHeld, "this job") if same else (UserError, "another job")
    with pytest.raises(error, match=message):
        run_in_process(this)
    assert parts(tmp_path / "out")


def test_a_job_that_loses_its_lease_begins_no_other_shard(
    inputs: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commit.lease.BEAT_SECONDS", 0.05)
    commit_shard = stages.commit_shard

    def lose_the_lease(*arguments: Any, folder: Any, **named: Any) -> Any:
        [heartbeats] = [thread for thread in threading.enumerate() if thread.name == "lease"]
        leases = sorted(name for name in folder.names("_job/lease") if name.endswith(".json"))
        folder.create("_job/lease/000009.json", folder.read(f"_job/lease/{leases[-1]}"))
        wait_until(lambda: not heartbeats.is_alive())
        return commit_shard(*arguments, folder=folder, **named)

    monkeypatch.setattr(stages, "commit_shard", lose_the_lease)
    with pytest.raises(LeaseLost):
        run_in_process(config(inputs, tmp_path / "out", checkpoint))
    assert len(parts(tmp_path / "out")) <= 1


def test_an_actor_that_does_not_see_the_jobs_output_answers_nothing(
    inputs: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local path on another node: there it is another folder, which is empty or holds another job."""
    job = config(inputs, tmp_path / "out", checkpoint)
    told = rf"^output.path: {tmp_path}/out on node .+ is not the folder in which this job began: give a path that all"
    monkeypatch.setattr("pipeline.answer.stage.Generator", lambda *_, **named: pytest.fail("loaded"))
    for found in (None, b"{}", b"{", b"[]", b'{"fingerprint": "of another job"}'):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with monkeypatch.context() as patched:

            def elsewhere(*given: Any, found: bytes | None = found) -> Any:
                (tmp_path / "out/_job/job.json").unlink()
                if found is not None:
                    (tmp_path / "out/_job/job.json").write_bytes(found)
                return check_output(*given)

            patched.setattr(stages, "check_output", elsewhere)
            with pytest.raises(UserError, match=told):
                run_in_process(job)
        assert not parts(tmp_path / "out")
