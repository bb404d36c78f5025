from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import boto3
import bucket_server
import pytest
import ray
from fault_proxy import Proxy, fault_proxy
from in_process import InProcess
from moved_clock import Clock
from ray_free_run import MadeUpParts

from actors.engine.cpu.kernels import library
from pipeline import job as jobs
from pipeline.config.job import StorageConfig
from pipeline.run import ray_head
from pipeline.runtime.announce import announce_to_log
from pipeline.storage.folder import Folder, open_folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test alone. The kernels come from the user's: to build them takes 15 s."""
    library()
    folder = tmp_path / "cache"
    monkeypatch.setenv("SKIPDECODE_CACHE", str(folder))
    return folder


@pytest.fixture
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A root logger as a new process has it; as before after the test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    yield
    announce_to_log(False)
    logging.captureWarnings(False)


CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages -%}
{% if message.role == 'user' and not loop.first and loop.previtem.role == 'user' -%}
{{ raise_exception('roles must alternate') }}{% endif -%}
[{{ message.role }}]{{ message.content }}{% if message.name %}({{ message.name }}){% endif %}</s>
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{% if thinking is false %}quick {% endif %}"""


@pytest.fixture(scope="session")
def chat_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a chat template that refuses two messages of the user in a row."""
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def s3() -> Iterator[StorageConfig]:
    """An S3 server in this process, with a bucket called bucket; it is empty when a file of tests begins."""
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    with bucket_server.serving() as url:
        yield StorageConfig(endpoint_url=url)


@pytest.fixture(scope="module", autouse=True)
def emptied_bucket() -> Iterator[None]:
    """What a file of tests leaves in the bucket would slow down the next."""
    yield
    bucket_server.empty()


CEPH_SCRIPT = Path(__file__).parents[2] / "infra" / "ceph.sh"


@pytest.fixture(scope="session")
def ceph(s3: StorageConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageConfig]:
    """A Ceph object gateway with an empty bucket called bucket and the credentials of `s3`."""
    if shutil.which("radosgw") is None:
        pytest.skip("Ceph's radosgw is not installed: make test-ceph")
    folder = tmp_path_factory.mktemp("ceph") / "gateway"
    try:
        started = subprocess.run(
            [CEPH_SCRIPT, "start", folder, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
        exports = dict(line.removeprefix("export ").split("=", 1) for line in started.stdout.splitlines())
        url = exports["AWS_ENDPOINT_URL"]
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield StorageConfig(endpoint_url=url)
    finally:
        if folder.exists():
            subprocess.run([CEPH_SCRIPT, "stop", folder], check=True, timeout=600)


@pytest.fixture
def local(tmp_path: Path) -> Folder:
    """A local output folder that does not exist yet."""
    return open_folder(str(tmp_path / "deep" / "out"), StorageConfig())


@pytest.fixture(params=["local", "s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def folder(request: pytest.FixtureRequest) -> Folder:
    """An output folder that does not exist yet, on a disk or in a bucket."""
    if request.param == "local":
        found: Folder = request.getfixturevalue("local")
        return found
    return open_folder(f"s3://bucket/{uuid.uuid4().hex}/out/", request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def behind(s3: StorageConfig) -> Iterator[Proxy]:
    """One proxy before `s3` for all tests of a file."""
    assert s3.endpoint_url
    with fault_proxy(s3.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def proxy(behind: Proxy) -> Iterator[Proxy]:
    """A proxy that passes everything on, until a test says otherwise."""
    behind.script, behind.requests = (lambda request: None), []
    behind.done.clear()
    yield behind
    behind.script = lambda request: None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which calls of a store are retried: it counts nothing but their waits, which take no time."""
    clock = Clock()

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr("pipeline.storage.s3.time", clock)
    monkeypatch.setattr("pipeline.storage.s3.asyncio", SimpleNamespace(sleep=sleep, Lock=asyncio.Lock))
    return clock


@pytest.fixture(scope="session")
def own_ray(s3: StorageConfig) -> Iterator[None]:
    """One Ray for all tests that run jobs on Ray in this process; it has two GPUs that do not exist.

    Depends on `s3`, so that Ray's workers inherit the credentials.
    """
    start_ray()
    yield
    ray.shutdown()


def start_ray() -> None:
    """Start Ray again: after a job that failed, a cancelled worker may be in the middle of an import."""
    ray.shutdown()
    own = {"address": "local", "num_cpus": 3, "num_gpus": 2, "include_dashboard": False, "log_to_driver": False}
    ray_head.start(own)  # once more if it is too slow


@pytest.fixture
def reports() -> None:
    """Jobs of the test write their report.html; see `_without_reports`."""


@pytest.fixture(autouse=True)
def _without_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that run in this process write no report.html: to draw one takes half a second."""
    if "reports" not in request.fixturenames:
        monkeypatch.setattr(jobs, "write_report", lambda *_: None)


@pytest.fixture(autouse=True)
def _without_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command in this process prints does not depend on how busy the machine is."""
    monkeypatch.setattr("pipeline.runtime.announce.QUIET_SECONDS", 600.0)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of the test run in this process, without Ray: those of the command line and of `adapt` too."""
    monkeypatch.setattr(jobs, "ray_backend", lambda **_: InProcess())


@pytest.fixture
def made_up_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of the test run in this process, and no model writes their parts."""
    monkeypatch.setattr(jobs, "ray_backend", lambda **_: MadeUpParts())


@pytest.fixture
def ray_to_be_left(own_ray: None) -> Iterator[None]:
    """Ray for a test whose job fails; started again after it."""
    yield
    start_ray()


@pytest.fixture(scope="module")
def no_ray(own_ray: None) -> Iterator[None]:
    """No Ray up to the last test of the file: to start it again after each takes many seconds."""
    ray.shutdown()
    yield
    start_ray()
