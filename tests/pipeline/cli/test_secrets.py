"""What a job's processes let out: no secret in anything that they write, no port open to other machines.

The quick test of that is `test_job`'s SIGTERM.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import Command
from in_process import job_config
from leaks import assert_listens_here_alone, assert_no_secret, listening, planted_secrets
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.messages import without_secrets
from pipeline.storage.folder import filesystem

PASSWORD = "planted-password"


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    with planted_secrets() as folder:
        yield folder


def bucket_job(checkpoint: Path, s3: StorageConfig, name: str, **changes: Any) -> JobConfig:
    """A job in the bucket with 24 rows, one of them bad."""
    fs, path = filesystem(f"s3://bucket/{name}", s3)
    with fs.open(f"{path}/in/a.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": [None, *(f"name[{row}]" for row in range(23))]}), file)
    own: dict[str, Any] = {"storage": s3.model_dump(), "actors": {"cache_bytes": 2**20}, "shard_rows": 4}
    own |= {"shared_prefix": False}  # to sample it starts a process at every plan
    return job_config(f"s3://bucket/{name}/in", f"s3://bucket/{name}/out", checkpoint, **own, **changes)


def written(s3: StorageConfig, name: str, *texts: str) -> dict[str, bytes]:
    """What the job wrote into the bucket, and what the command printed."""
    fs, path = filesystem(f"s3://bucket/{name}/out", s3)
    files = {one: fs.cat_file(one) for one in fs.find(path)}
    return files | {f"output {number}": text.encode() for number, text in enumerate(texts)}


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_tells_no_secret_and_listens_to_this_machine_alone(
    checkpoint: Path, s3: StorageConfig, tmp_path: Path, ray_folder: Path
) -> None:
    job = bucket_job(checkpoint, s3, "good")
    command = Command(tmp_path, job, "--verbose", "--json")
    ports: set[tuple[str, str]] = set()
    fs, path = filesystem(job.output.path, s3)

    def answered() -> bool:
        ports.update(listening(command.process.pid))
        return bool(fs.glob(f"{path}/part-*.parquet"))

    command.wait_until(answered, every=0.25)
    code, out, err = command.end()
    assert code == 0, err
    assert_listens_here_alone(ports)
    assert_no_secret(written(s3, "good", out, err), ray_folder)


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_fails_tells_no_secret(
    checkpoint: Path, s3: StorageConfig, tmp_path: Path, ray_folder: Path
) -> None:
    job = bucket_job(checkpoint, s3, "bad", model={"path": str(tmp_path / "gone"), "dtype": "float32"})
    shutil.copytree(checkpoint, tmp_path / "gone")
    data = bytearray((tmp_path / "gone" / "model.safetensors").read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    header = bytes(data[8:first]).replace(b"model.layers.0.mlp.up_proj", b"model.layers.0.mlp.no_proj")
    (tmp_path / "gone" / "model.safetensors").write_bytes(data[:8] + header + data[first:])
    code, out, err = Command(tmp_path, job, "--verbose").end()
    assert code == 2 and "no weights for model.layers.0.mlp.up_proj.weight" in err.splitlines()[-1], err
    assert_no_secret(written(s3, "bad", out, err), ray_folder)


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
    file = tmp_path / "job.yaml"
    file.write_text("input: {path: a}\noutput: {path: b}\nmodel: {path: c}\n")
    for options in ([], ["--verbose"]):
        result = CliRunner().invoke(app, ["run", str(file), "--set", change, *options])
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
