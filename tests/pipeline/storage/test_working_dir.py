"""The working directory of a submitted Ray job, without Ray: what may be written, and that a second submit resumes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from in_process import answered_rows, job_values, run_interrupted
from ray.dashboard.modules.job.job_supervisor import JobSupervisor
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.checkpoints.local import check_same, pin
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.run.ray_session import STOP_SECONDS, warn_of_short_stop
from pipeline.storage.working_dir import check_outlives_job, local_version, portable, unpacked

Unpack = Callable[[str], Path]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's folder: prompts, labels, a nightly inbox."""
    folder = tmp_path / "mine"
    (folder / "inbox").mkdir(parents=True)
    (folder / "in.csv").write_text("prompt\n" + "".join(f"alpha {row}\n" for row in range(8)))
    (folder / "labels.json").write_text('["alpha", "bravo"]')
    pq.write_table(pa.table({"prompt": [f"bravo {row}" for row in range(8)]}), folder / "inbox" / "a.parquet")
    return folder


@pytest.fixture
def unpack(tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> Unpack:
    """A function that unpacks `mine` as Ray 2.60 does for a job's driver, under the name of a package."""

    def to(name: str) -> Path:
        folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / name
        shutil.copytree(mine, folder, copy_function=shutil.copyfile)  # the times of the files are new
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    return to


def call(*arguments: Path | str) -> tuple[int, str]:
    """Exit status and standard error of a command."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.stderr


def listed(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_paths_in_the_working_directory_are_the_same_on_every_node_and_in_every_submit(
    unpack: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = unpack("_ray_pkg_1")
    assert portable(str(first)) == "working-dir://."
    assert portable(f"{first}/in.csv") == "working-dir://./in.csv"
    assert portable(f"{first}-more/in.csv") == f"{first}-more/in.csv"
    times = os.stat("in.csv").st_mtime_ns
    version = local_version(f"{first}/in.csv", os.stat("in.csv"))
    second = unpack("_ray_pkg_2")
    os.utime("in.csv", ns=(times + 10**9, times + 10**9))
    assert local_version(f"{second}/in.csv", os.stat("in.csv")) == version
    assert unpacked("working-dir://./in.csv") == f"{second}/in.csv"
    (second / "in.csv").write_text("prompt\nother\n")
    assert local_version(f"{second}/in.csv", os.stat("in.csv")) != version
    monkeypatch.chdir(tmp_path)  # as after `cd` in the entry point
    assert portable(f"{second}/in.csv") == "working-dir://./in.csv"
    monkeypatch.setenv("PYTHONPATH", "")
    assert portable(f"{second}/in.csv") == f"{second}/in.csv"
    with pytest.raises(UserError, match="submit the job again"):
        unpacked("working-dir://./in.csv")


def test_a_model_in_the_working_directory_is_found_on_another_node(
    unpack: Unpack, mine: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, mine / "model")
    pinned = pin(unpack("_ray_pkg_1") / "model")
    there = unpack("_ray_pkg_2") / "model"
    assert check_same(pinned, weights=True) == there


def test_an_output_that_ray_deletes_is_refused_through_links_too(unpack: Unpack, tmp_path: Path) -> None:
    package = unpack("_ray_pkg_1")
    (tmp_path / "link").symlink_to(package, target_is_directory=True)
    (package / "shared").symlink_to(tmp_path, target_is_directory=True)
    places = (
        *("out", "./deep/out", str(package), f"{package}/out", f"file://{package}/out"),
        *(f"{tmp_path}/link/out", "shared/link/out", "working-dir://./out", f"{package.parent}/_ray_pkg_2/out"),
    )
    for place in places:
        with pytest.raises(UserError, match=r"output\.path: .* Ray deletes it: give an absolute path .*s3://"):
            check_outlives_job("output.path", place)
    for place in (f"{tmp_path}/out", "shared/out", "s3://bucket/runtime_resources/working_dir_files/x/out"):
        check_outlives_job("output.path", place)


@pytest.mark.parametrize("kind", ["run", "nightly", "adapt", "init", "demo"])
def test_a_command_that_writes_into_the_working_directory_is_refused_before_it_writes(
    kind: str, unpack: Unpack, mine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, mine / "model")
    job = job_values("in.csv", "out", "model")
    nightly = job_values("inbox", "out", "model", input={"since": "last_success"})
    adapt = {**job, "output": {"path": f"{tmp_path}/out"}, "adapt": {"output": "adapted"}}
    files = {"run": job, "nightly": nightly, "adapt": adapt}
    (mine / "job.yaml").write_text(yaml.safe_dump(files.get(kind, {})))
    package = unpack("_ray_pkg_1")
    before = listed(tmp_path)
    arguments = {
        "nightly": ["run", "job.yaml"],
        "init": ["init", "in.csv", "--output", "new.yaml"],
        "demo": ["demo"],
    }
    code, said = call(*arguments.get(kind, [kind, "job.yaml"]))
    assert code == 2, said
    *_, line = said.splitlines()
    assert re.search(r"is in the temporary copy that `ray job submit` made of your folder, and Ray deletes it", line)
    assert listed(tmp_path) == before and listed(package) <= before


def test_a_page_is_not_written_into_the_working_directory(
    unpack: Unpack, mine: Path, tmp_path: Path, checkpoint: Path, made_up_parts: None
) -> None:
    """Neither with --to nor into an output that was uploaded with the folder."""
    values = job_values(mine / "in.csv", mine / "answers", checkpoint)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    assert call("run", tmp_path / "job.yaml")[0] == 0
    before = listed(unpack("_ray_pkg_1"))
    for options in (["--html", "--to", "page.html"], ["--html"], ["--write"]):
        code, said = call("report", "answers", *options)
        assert code == 2 and f"{options[-1] if len(options) == 1 else '--to'}: " in said
    assert call("report", "answers", "--html", "--to", tmp_path / "page.html")[0] == 0
    assert listed(Path.cwd()) == before


def test_a_second_submit_resumes_the_job_and_draws_the_same_random_numbers(
    unpack: Unpack, mine: Path, tmp_path: Path, checkpoint: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, mine / "model")
    values = job_values("in.csv", tmp_path / "out", "model", shard_rows=2)
    values |= {"choices": "labels.json", "sampling": {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}}
    (mine / "job.yaml").write_text(yaml.safe_dump(values))
    unpack("_ray_pkg_1")
    run_interrupted(monkeypatch, JobConfig.model_validate({**values, "choices": ["alpha", "bravo"]}))
    early = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*.parquet")}
    assert 0 < len(early) < 4
    (mine / "notes.txt").write_text("this changes the package")
    unpack("_ray_pkg_2")
    code, said = call("run", "job.yaml")
    assert code == 0, said
    assert {path: path.stat().st_mtime_ns for path in early} == early
    rows = answered_rows(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"in.csv:{row}" for row in range(8)]
    code, said = call("run", "job.yaml", "--set", f"output.path={tmp_path}/whole")
    assert code == 0, said
    assert [row["generated_text"] for row in answered_rows(tmp_path / "whole")] == [
        row["generated_text"] for row in rows
    ]
    monkeypatch.chdir(mine)
    monkeypatch.delenv("PYTHONPATH")
    code, said = call("run", "job.yaml")
    assert code == 2 and "in.csv: is in the folder that `ray job submit --working-dir` uploaded; submit" in said


def test_a_changed_file_of_the_working_directory_is_refused(
    unpack: Unpack, mine: Path, tmp_path: Path, checkpoint: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = job_values("in.csv", tmp_path / "out", checkpoint, shard_rows=2)
    (mine / "job.yaml").write_text(yaml.safe_dump(values))
    unpack("_ray_pkg_1")
    run_interrupted(monkeypatch, JobConfig.model_validate(values))
    (mine / "in.csv").write_text((mine / "in.csv").read_text().replace("alpha 7", "bravo 7"))
    unpack("_ray_pkg_2")
    code, said = call("run", "job.yaml")
    assert code == 2 and "working-dir://./in.csv: changed since the job began" in said


def test_nightly_runs_know_the_files_of_earlier_submits(
    unpack: Unpack, mine: Path, tmp_path: Path, checkpoint: Path, made_up_parts: None
) -> None:
    values = job_values("inbox", tmp_path / "out", checkpoint, input={"since": "last_success"})
    (mine / "job.yaml").write_text(yaml.safe_dump(values))
    unpack("_ray_pkg_1")
    assert call("run", "job.yaml")[0] == 0
    shutil.copyfile(mine / "inbox" / "a.parquet", mine / "inbox" / "b.parquet")
    unpack("_ray_pkg_2")
    assert call("run", "job.yaml")[0] == 0
    unpack("_ray_pkg_3")
    assert call("run", "job.yaml")[0] == 0
    runs = sorted(path.parent for path in (tmp_path / "out").glob("*/_SUCCESS"))
    files = [pq.read_table(run / "_job" / "inputs.pq")["url"].to_pylist() for run in runs]
    assert files == [["working-dir://./inbox/a.parquet"], ["working-dir://./inbox/b.parquet"]]


def test_a_submitted_job_says_how_many_seconds_a_stop_leaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert STOP_SECONDS == JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    warn_of_short_stop(20)
    assert not caplog.messages
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    warn_of_short_stop(20)
    (line,) = caplog.messages
    assert line.startswith("`ray job stop` leaves this job 3 s, less than grace_seconds = 20")
    assert "RAY_JOB_STOP_WAIT_TIME_S=45" in line
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "20")
    warn_of_short_stop(20)
    assert len(caplog.messages) == 1
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "soon")
    with pytest.raises(UserError, match="RAY_JOB_STOP_WAIT_TIME_S: 'soon' is not a whole number"):
        warn_of_short_stop(20)
