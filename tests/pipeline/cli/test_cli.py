"""The command line as a user meets it: one line for what is wrong, exit 2, and no model is loaded before it."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from cli_command import Command
from in_process import InProcess, invoke, job_config, job_values
from leaks import assert_no_secret, planted_secrets
from ray.exceptions import ActorDiedError, RayTaskError
from shown_commands import ROOT
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.cli.app import app
from pipeline.cli.command import cause_line, user_error
from pipeline.cli.command import command as running
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.messages import install_command, without_secrets
from pipeline.plan.job import plan
from pipeline.storage.errors import StoreFailed
from pipeline.storage.folder import filesystem


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"id": ["a"], "prompt": ["alpha"], "n": [1]}), tmp_path / "in.parquet")
    values = job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, input={"id": "id"})
    return {**values, "sampling": {}, "shared_prefix": False}


def refused(tmp_path: Path, job: dict[str, Any], *options: str, command: str = "run") -> str:
    """The one line that the command prints before it exits 2, with nothing written and no weights read."""
    file = tmp_path / "job.yaml"
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("ray", "init"), ("actors.engine.build", "load_decoder")):
            patch.setattr(f"{module}.{name}", lambda *args, **kwargs: pytest.fail("too late"))
        result = invoke(tmp_path, job, *options, command=command)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"skipdecode: {file}: ") or lines[0].startswith("skipdecode: --set")
    assert not (tmp_path / "out" / "_job" / "job.json").exists()
    return lines[0]


@pytest.mark.parametrize(
    ("command", "change", "words"),
    [
        ("run", {"input": {"prompt": "question"}}, "'question'; it has id, prompt, n"),
        ("run", {"input": {"template": "{{ prompt }"}}, "input.template: line 1"),
        ("run", {"input": {"path": "/none/at/all.parquet"}}, "/none/at/all.parquet"),
        ("run", {"input": {"path": "no.csv"}}, f"no.csv: no such file or folder in the current folder, {os.getcwd()}"),
        ("run", {"output": {"keep": ["error"]}}, "output.keep: error"),
        ("run", {"output": {"path": "{tmp}/file"}}, "output.path: {tmp}/file is a file"),
        ("run", {"output": {"path": "{tmp}/file/deeper/out"}}, "output.path: {tmp}/file is a file"),
        ("run", {"output": {"path": "/proc/none/out"}}, "output.path: /proc/none/out cannot be written"),
        ("run", {"model": {"path": "/none"}}, "/none: no such checkpoint folder"),
        ("plan", {"schedule": {"depths": [4, 9]}}, "depths[1] = 9"),
        ("run", {"schedule": {"keep_order": "measured"}}, "keep_order = measured: `skipdecode adapt`"),
        ("try", {"schedule": {"speedup": 0.2}}, "speedup = 0.2"),
        ("run", {"schedule": {"keep_order": "early_exit"}}, "(it was trained with another keep_order or warmup)"),
        ("run", {"schedule": {"keep_order": "early_exit"}}, "`skipdecode adapt JOB`, or set schedule.unadapted: true"),
        ("run", {"input": {"too_long": "truncate_left"}, "sampling": {"max_new_tokens": 64}}, "max_new_tokens = 64"),
    ],
)
def test_a_wrong_job_is_one_line_and_exit_2(
    tmp_path: Path, job: dict[str, Any], command: str, change: dict[str, dict[str, Any]], words: str
) -> None:
    (tmp_path / "file").write_text("precious")
    for section, values in change.items():
        placed = {key: value.format(tmp=tmp_path) if key == "path" else value for key, value in values.items()}
        job[section] = {**job.get(section, {}), **placed}
    assert words.format(tmp=tmp_path) in refused(tmp_path, job, command=command)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("command", ["run", "try"])
def test_a_checkpoint_that_no_training_made_fast_is_refused(
    tmp_path: Path, job: dict[str, Any], checkpoint: Path, command: str
) -> None:
    published = tmp_path / "published"
    shutil.copytree(checkpoint, published)
    (published / "skipdecode.json").unlink()
    job |= {"model": {"path": str(published), "dtype": "float32"}, "schedule": {"speedup": 2}}
    assert f"{published} is not adapted to this schedule (it has no skipdecode.json)" in refused(
        tmp_path, job, command=command
    )
    (published / "skipdecode.json").write_text('{"num_layers": 4, "speedup": 2, "horizon": 6}')
    job["schedule"] = {}
    assert "(skipdecode.json records no training)" in refused(tmp_path, job, command=command)
    for allowed in ({"speedup": 1}, {"unadapted": True}):
        plan(JobConfig.model_validate({**job, "schedule": allowed}), None, InProcess())


@pytest.mark.parametrize("section", ["input", "model", "output"])
def test_a_store_outage_while_planning_is_exit_1(tmp_path: Path, job: dict[str, Any], section: str) -> None:
    job[section]["path"] = "s3://bucket/folder"
    job["storage"] = {"endpoint_url": "http://127.0.0.1:9", "retry_seconds": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.init", lambda **_: pytest.fail("too late"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        result = invoke(tmp_path, job)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("skipdecode: failed: s3://bucket/folder") and "Could not connect" in line


@pytest.fixture
def lost_bucket(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's output is in a bucket that cannot be reached."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    job["output"]["path"] = "s3://bucket/folder"
    job["storage"] = {"endpoint_url": "http://127.0.0.1:9", "retry_seconds": 0}


@pytest.mark.parametrize(
    ("argument", "options", "code", "words"),
    [
        ("{tmp}/job.yaml", [], 1, "http://127.0.0.1:9"),
        ("{tmp}/job.yaml", ["--set", "output.path={tmp}/out"], 2, "{tmp}/out: no job here (no _job/job.json)"),
        ("{tmp}/job.yaml", ["--set", "output.path={tmp}/file"], 2, "{tmp}/file: no job here (no _job/job.json)"),
        ("{tmp}/out", ["--set", "output.path=other"], 2, "--set needs a job file"),
        ("s3://bucket/out", ["--endpoint-url", "http://127.0.0.1:9"], 1, "give --endpoint-url or the job file; "),
    ],
)
@pytest.mark.usefixtures("lost_bucket")
def test_a_report_of_nothing_says_where_it_looked(
    tmp_path: Path,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    argument: str,
    options: list[str],
    code: int,
    words: str,
) -> None:
    (tmp_path / "file").write_text("a file, such as a part")
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    if argument.startswith("s3://"):  # without the endpoint, which the option asks for
        options = []
        monkeypatch.setattr("pipeline.storage.folder.open_folder", Mock(side_effect=StoreFailed("Could not connect")))
    placed = [one.format(tmp=tmp_path) for one in ("report", argument, *options)]
    result = CliRunner().invoke(app, placed)
    assert result.exit_code == code and words.format(tmp=tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_system_without_hard_links_is_exit_2(
    tmp_path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        assert source.parent != target.parent  # BeeGFS has hard links, but only within a folder
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert f"output.path: the file system of {tmp_path}/out has no hard links (Operation not" in refused(tmp_path, job)
    assert not list((tmp_path / "out" / "_job" / "tmp").iterdir())


def test_a_lease_that_is_held_is_exit_5(tmp_path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.commit import lease
    from pipeline.storage.folder import open_folder

    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    other = lease.Lease(open_folder(job["output"]["path"], StorageConfig()), beat=0.1, watch=1)
    other.acquire(lambda: None)
    try:
        result = invoke(tmp_path, job)
    finally:
        other.release()
    assert result.exit_code == 5
    assert "another run holds" in result.stderr
    assert f"process {other.holder.pid} on {other.holder.host}, since 20" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Exception("The current node timed out\nduring startup."), 1, "failed: "),
        (ConnectionError("no Ray instance at 1.2.3.4"), 1, "failed: no Ray instance at 1.2.3.4; the same command"),
        (SystemExit(15), 4, "interrupted (SIGTERM); the same command finishes the job"),  # from Ray's own handler
    ],
)
def test_a_ray_that_does_not_start_is_one_line(
    tmp_path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # else a process starts Ray first
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", Mock(side_effect=error))
    result = invoke(tmp_path, job)
    assert (result.exit_code, result.exception.__class__) == (code, SystemExit)
    assert result.stderr.splitlines()[-1].startswith(f"skipdecode: {line}")
    assert not (tmp_path / "out").exists()  # a cluster is asked for its nodes before anything is written


def test_the_cause_of_a_failed_task_leaves_out_advice_on_retries() -> None:
    from ray.data._internal.util import _annotate_exception_with_retry_context

    error: BaseException = UserError("Traceback\n  File x\nUserError: a.parquet: damaged; replace the file")
    for _ in range(2):  # a task's own, and the operator's around it
        error = _annotate_exception_with_retry_context(
            error, description="run it", attempts=1, max_attempts=3, total_backoff_s=0.0, exception_str=""
        )
    assert str(error).splitlines()[-1].startswith("To change retry attempts")
    assert cause_line(error) == str(user_error(error)) == "UserError: a.parquet: damaged; replace the file"


def ended(error: Exception, **advice: Any) -> tuple[int, str]:
    """Exit status and last line of a command that raises an error."""
    command = typer.Typer()

    @command.command()
    def main() -> None:
        with running(**advice):
            raise error

    result = CliRunner().invoke(command, [])
    assert len(result.stderr.splitlines()) == 1
    return result.exit_code, result.stderr.strip().removeprefix("skipdecode: ")


def task_error(text: str, cause: Exception, **actor: str) -> RayTaskError:
    return RayTaskError("f", f"Traceback\n{text}", cause, **actor)


CHANGED, OLD_PEFT = UserError("a.parquet: changed"), "cannot import name 'Foo' from 'peft' (peft 0.1)"
IN_TASK = task_error("UserError: a.parquet: changed", CHANGED)
IN_CODE = task_error("ValueError: shapes differ", ValueError("shapes differ"))
IN_ACTOR = task_error("actors.engine.errors.UserError: no weights", UserError("no weights"), actor_id="0" * 32)


@pytest.mark.parametrize(
    ("error", "advice", "code", "line"),
    [
        (UserError("input.path: none"), {}, 2, "input.path: none"),
        (UserError("input.path: none"), {"file": "job.yaml"}, 2, "job.yaml: input.path: none"),
        (IN_TASK.as_instanceof_cause(), {}, 2, "a.parquet: changed"),
        (task_error("UserError: x", IN_TASK).as_instanceof_cause(), {}, 2, "a.parquet: changed"),
        (ActorDiedError(IN_ACTOR), {}, 2, "no weights"),
        (IN_CODE.as_instanceof_cause(), {}, 1, "failed: ValueError: shapes differ; traceback: {log}"),
        (ValueError("shapes"), {"failed": "go on"}, 1, "failed: ValueError: shapes; go on; traceback: {log}"),
        (pa.ArrowInvalid("shapes"), {}, 1, "failed: ArrowInvalid: shapes; traceback: {log}"),
        (ImportError(OLD_PEFT, name="peft"), {}, 1, f"failed: ImportError: {OLD_PEFT}; traceback: {{log}}"),
        (ModuleNotFoundError("No x", name="x"), {}, 1, "failed: ModuleNotFoundError: No x; traceback: {log}"),
        (
            ModuleNotFoundError("", name="rouge_score"),
            {},
            2,
            f"rouge_score is not installed: {install_command('eval')}",
        ),
    ],
)
def test_an_error_ends_a_command_with_one_line_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, advice: dict[str, str], code: int, line: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = ended(error, **advice)
    logs = list(tmp_path.glob("skipdecode-*.log"))
    assert found == (code, line.format(log=logs[0] if logs else ""))
    assert len(logs) == (code == 1)
    if logs:
        assert "Traceback" in logs[0].read_text() and str(error).splitlines()[-1] in logs[0].read_text()


def test_a_log_file_that_cannot_be_written_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/none/at/all")
    assert ended(KeyError("x")) == (1, "failed: KeyError: 'x'; --verbose prints the traceback")


def imported_with(module: str) -> set[str]:
    """Of the heavy libraries, those that a module of ours brings along."""
    code = f"import json, sys, {module}; print(json.dumps([one for one in sys.modules if '.' not in one]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"torch", "ray", "transformers"} & set(json.loads(done.stdout))


def test_planning_imports_neither_ray_nor_torch_at_first() -> None:
    assert imported_with("pipeline.job") == set()


@pytest.mark.parametrize(("command", "text"), [("run", "input: ["), ("adapt", "inptu: {}"), ("evaluate", "input: [")])
def test_a_mistyped_file_is_refused_before_heavy_libraries_are_imported(
    tmp_path: Path, command: str, text: str
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    code = f"""
import sys
from pipeline.cli.app import app
from pipeline.storage.errors import StoreFailed
try:
    app(["{command}", "{file}"])
except SystemExit as error:
    assert error.code == 2, error.code
print(*sorted({{"torch", "ray", "transformers", "pyarrow", "numpy", "s3fs"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert len(done.stderr.splitlines()) == 1


def test_a_job_file_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("für: {}\n")
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "pipeline", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.stderr.decode().startswith("skipdecode: job.yaml: unknown key für; known: ")


def test_help_names_the_commands_and_the_version_is_the_packages() -> None:
    assert imported_with("pipeline.cli.app") == set()
    output = CliRunner().invoke(app, ["--help"]).output
    for command in ("run", "adapt", "evaluate", "report"):
        assert command in output
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"skipdecode {version}\n")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


PASSWORD = "planted-password"


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_fails_tells_no_secret(checkpoint: Path, s3: StorageConfig, tmp_path: Path) -> None:
    """In a worker process: planning reads no page of the input."""
    sink, (fs, path) = io.BytesIO(), filesystem("s3://bucket/bad", s3)
    pq.write_table(pa.table({"prompt": [f"alpha {row}" for row in range(50)]}), sink)
    data = sink.getvalue()
    fs.pipe_file(f"{path}/in/a.parquet", data[:4] + bytes(100) + data[104:])
    own: dict[str, Any] = {"storage": s3.model_dump(), "shared_prefix": False}
    job = job_config("s3://bucket/bad/in", "s3://bucket/bad/out", checkpoint, **own)
    with planted_secrets() as ray_folder:
        code, out, err = Command(tmp_path, job, "--verbose").end()
        assert code == 1 and "bad/in/a.parquet: cannot be read, since it is damaged" in err.splitlines()[-1], err
        written = {one: fs.cat_file(one) for one in fs.find(f"{path}/out")}
        assert_no_secret({**written, "out": out.encode(), "err": err.encode()}, ray_folder)


@pytest.mark.parametrize(
    "change",
    [
        f"storage.endpoint_url=http://user:{PASSWORD}@127.0.0.1:9",
        f"storage.endpoint_url=http://KEY:ab/{PASSWORD}@minio:9000",
        f"storage.endpoint_url=http://KEY:{PASSWORD}/cd@minio:9000",
        f"storage.endpoint_url=KEY:{PASSWORD}@minio:9000",
        f"storage.endpoint_url=http://{PASSWORD}/cd@minio",
        f"input.path=s3://user:{PASSWORD}/x@bucket/in",
        f"input.path=s3://user:{PASSWORD}@bucket/in",
        f"input.path=[a, 's3://user:{PASSWORD}@bucket/in']",
        f"output.path=s3://user:{PASSWORD}@bucket/out",
        f"model.path=s3://user:{PASSWORD}@bucket/model",
        f"model.path=https://{PASSWORD}@hub/x",
        f"storage=s3://user:{PASSWORD}@bucket",
        f"storage.x.y=s3://user:{PASSWORD}@bucket",
        f"input.path.x=s3://user:{PASSWORD}@bucket",
        f"shard_rows=s3://user:{PASSWORD}@bucket",
    ],
)
def test_a_password_in_a_place_is_refused_and_not_repeated(tmp_path: Path, change: str) -> None:
    for options in ([], ["--verbose"]):
        result = invoke(tmp_path, job_values("a", "b", "c"), "--set", change, *options)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert PASSWORD not in result.output


def test_a_password_in_broken_yaml_or_in_reports_options_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for url in (f"http://user:{PASSWORD}@host", f"http://user:ab/{PASSWORD}/cd@host"):
        for text in (f"storage: {{endpoint_url: {url}, x: [}}", f"storage: *{url}", f"a: {url}\na: {url}\n"):
            file.write_text(text)
            result = CliRunner().invoke(app, ["run", str(file)])
            assert result.exit_code == 2 and PASSWORD not in result.output, result.output
    result = CliRunner().invoke(app, ["report", f"s3://user:{PASSWORD}@b/c", "--endpoint-url", url])
    assert result.exit_code == 2 and PASSWORD not in result.output
    assert "--endpoint-url: endpoint_url: holds a user or password" in result.output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://KEY:ab/cd@minio:9000 is not there", "http://***@minio:9000 is not there"),
        ("http://key@host/x, s3://a:b@c/d@e", "http://***@host/x, s3://***@e"),
        ("http://host:9000/x is not there; ask a@b", "http://host:9000/x is not there; ask a@b"),
        ("s3://bucket/name@revision", "s3://bucket/name@revision"),
    ],
)
def test_messages_show_no_password(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
