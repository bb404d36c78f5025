"""No secret in anything that a job's processes write. Of a job that is stopped: `test_job`'s SIGTERM."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import Command
from in_process import invoke, job_config, job_values
from leaks import assert_no_secret, planted_secrets
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.job import StorageConfig
from pipeline.messages import without_secrets
from pipeline.storage.folder import filesystem

PASSWORD = "planted-password"


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_fails_tells_no_secret(checkpoint: Path, s3: StorageConfig, tmp_path: Path) -> None:
    """In a worker process: planning reads no page of the input."""
    sink, (fs, path) = io.BytesIO(), filesystem("s3://bucket/bad", s3)
    pq.write_table(pa.table({"prompt": [f"alpha {row}" for row in range(50)]}), sink)
    data = sink.getvalue()
    fs.pipe_file(f"{path}/in/a.parquet", data[:4] + bytes(100) + data[104:])
    own: dict[str, Any] = {"storage": s3.model_dump(), "shared_prefix": False}  # a sample of rows would find it
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
