"""A disk and an object store keep the same promises; what is created is whole, and created once."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.job import StorageConfig
from pipeline.storage.folder import Folder, LocalFolder, ObjectFolder, filesystem, open_folder, probe_create

LOCAL = StorageConfig()


@pytest.fixture(params=["local", "s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An output folder that does not exist yet."""
    if request.param == "local":
        found = open_folder(str(tmp_path / "deep" / "out"), LOCAL)
        assert isinstance(found, LocalFolder)
        return found
    found = open_folder(f"s3://bucket/{uuid.uuid4().hex}/out/", request.getfixturevalue(request.param))
    assert isinstance(found, ObjectFolder)
    return found


def test_a_folder_that_is_not_there_is_empty(folder: Folder) -> None:
    assert folder.names() == folder.names("_job/commits") == []
    folder.remove("nothing")
    with pytest.raises(FileNotFoundError):
        folder.read("nothing")


def test_a_large_file_is_created_once(folder: Folder) -> None:
    """Larger than s3fs's own threshold of a multipart upload, which need not heed the condition."""
    data = b"0123456789abcdef" * (12 * 2**20 // 16)
    assert folder.create("part", data)
    assert not folder.create("part", b"x" + data)
    assert folder.read("part") == data


def test_of_many_at_once_one_wins(folder: Folder) -> None:
    for round_ in range(3):
        start, won = threading.Barrier(8), []

        def go(number: int, name: str, start: threading.Barrier, won: list[int]) -> None:
            start.wait()
            if folder.create(name, str(number).encode() * 1000):
                won.append(number)

        name = f"part-{round_}"
        threads = [threading.Thread(target=go, args=(number, name, start, won)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert folder.read(name) == str(won[0]).encode() * 1000
    assert folder.names() == ["part-0", "part-1", "part-2"]


def test_many_are_removed_at_once(folder: Folder) -> None:
    for name in ("a/0", "a/1", "a/2", "b"):
        folder.replace(name, b"x")
    folder.remove_all([f"a/{number}" for number in (0, 2, *range(3, 1500))])
    assert folder.names("a") == ["1"] and folder.names() == ["b"]
    folder.remove_all([])


CREATOR = """
import os, sys
from pipeline.config.job import StorageConfig
from pipeline.storage.folder import open_folder
folder = open_folder(sys.argv[1], StorageConfig(endpoint_url=sys.argv[2]))
folder.names()  # connected
print("ready", flush=True)
sys.stdin.readline()
print(*(number for number in range(20) if folder.create(f"part-{number}", str(os.getpid()).encode() * 10_000)))
"""


@pytest.mark.parametrize("store", ["s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_of_many_processes_one_wins(store: str, request: pytest.FixtureRequest) -> None:
    storage = request.getfixturevalue(store)
    folder = open_folder(f"s3://bucket/{uuid.uuid4().hex}", storage)
    arguments = [sys.executable, "-c", CREATOR, folder.url, storage.endpoint_url]
    creators = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for creator in creators:
        assert creator.stdout is not None and creator.stdout.readline() == "ready\n"
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("go\n")
        creator.stdin.flush()
    won = [(number, creator.pid) for creator in creators for number in map(int, creator.communicate()[0].split())]
    assert sorted(number for number, _ in won) == list(range(20))
    for number, pid in won:
        assert folder.read(f"part-{number}") == str(pid).encode() * 10_000


def test_replace_writes_over(folder: Folder) -> None:
    large = b"0123456789abcdef" * (12 * 2**20 // 16)
    folder.replace("_job/job.json", b"one")
    folder.replace("_job/job.json", b"two")
    assert folder.read("_job/job.json") == b"two" and folder.names("_job") == ["job.json"]
    folder.replace("_job/plan.parquet", large)
    assert folder.read("_job/plan.parquet") == large


def test_some_bytes_of_a_file_are_read(folder: Folder) -> None:
    folder.replace("a", b"0123456789")
    with folder.open("a") as file:
        file.seek(3)
        assert file.read(4) == b"3456"
    with pytest.raises(FileNotFoundError):
        folder.open("b")


def test_names_are_the_files_of_one_folder(folder: Folder) -> None:
    for name in ("part-1", "part-0", "_job/commits/000.json", "_job/job.json"):
        folder.replace(name, b"x")
    assert folder.names() == ["part-0", "part-1"]
    assert folder.names("_job") == ["job.json"]
    assert folder.names("_job/commits") == ["000.json"]


def test_both_stores_heed_the_condition(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert probe_create(folder) is folder
    assert not caplog.records and folder.names("_job") == []


class Forgetful(LocalFolder):
    """A store that ignores conditions, as some S3 look-alikes do."""

    def create(self, name: str, data: bytes) -> bool:
        self.replace(name, data)
        return True


def test_a_store_that_ignores_conditions_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Forgetful(str(tmp_path), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert probe_create(folder) is folder
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path) in caplog.text and "ignores conditional puts" in caplog.text
    assert folder.names("_job") == []


def test_a_folder_marker_is_no_file(s3: StorageConfig) -> None:
    """The S3 console makes an empty object `run-1/` where one asks it for a folder."""
    root = f"bucket/{uuid.uuid4().hex}"
    fs, _ = filesystem("s3://bucket", s3)
    fs.call_s3("put_object", Bucket="bucket", Key=root.removeprefix("bucket/") + "/", Body=b"")
    folder = open_folder(f"s3://{root}", s3)
    assert folder.names() == []
    folder.replace("a", b"")
    assert folder.names() == ["a"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["create", "replace", "remove"]), st.sampled_from("ab"), st.binary()), max_size=9
    )
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_folder_is_a_dictionary_of_names(folder: Folder, steps: list[tuple[str, str, bytes]]) -> None:
    held: dict[str, bytes] = {}
    for name in "ab":
        folder.remove(name)
    for step, name, data in steps:
        if step == "create":
            assert folder.create(name, data) == (name not in held)
            held.setdefault(name, data)
        elif step == "replace":
            folder.replace(name, data)
            held[name] = data
        else:
            folder.remove(name)
            held.pop(name, None)
        assert folder.names() == sorted(held)
    assert {name: folder.read(name) for name in folder.names()} == held


@pytest.mark.parametrize("url", ["gs://bucket/x", "http://host/x", "hdfs://x", "S4://x"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not supported; use a local path or s3://, or mount") as caught:
        open_folder(url, LOCAL)
    assert str(caught.value).startswith(f"{url}: ")


def test_a_url_names_its_file_system(tmp_path: Path) -> None:
    open_folder(f"file://{tmp_path}/x", LOCAL).replace("a", b"1")
    assert open_folder(str(tmp_path / "x"), LOCAL).read("a") == b"1"
    assert open_folder(str(tmp_path / "x"), LOCAL).url == str(tmp_path / "x")
