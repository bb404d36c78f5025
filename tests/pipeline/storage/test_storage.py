"""A disk and an object store keep the same promises; a folder of ours replaces and removes only files that it lists."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_folder import MemoryFolder, outcome

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.storage.folder import Folder, LocalFolder, ObjectFolder, filesystem, make_writable, open_folder
from pipeline.storage.local_output import check_apart
from pipeline.storage.s3 import PatientS3FileSystem

LOCAL = StorageConfig()


def test_a_large_file_is_created_once(folder: Folder) -> None:
    """Larger than s3fs's own threshold of a multipart upload, which need not heed the condition."""
    data = b"0123456789abcdef" * (12 * 2**20 // 16)
    assert folder.create("part", data)
    assert not folder.create("part", b"x" + data)
    assert folder.read("part") == data


def test_of_many_at_once_one_wins(folder: Folder) -> None:
    """Each on a connection of its own, as processes are."""
    clients: list[Folder] = [folder] * 8
    if isinstance(folder, ObjectFolder):
        options = {**folder.fs.storage_options, "skip_instance_cache": True}
        clients = [replace(folder, fs=PatientS3FileSystem(**options)) for _ in clients]
    start = threading.Barrier(8)

    def create(name: str, number: int) -> bool:
        start.wait()
        return clients[number].create(name, str(number).encode() * 1000)

    with ThreadPoolExecutor(8) as pool:
        for name in ("part-0", "part-1", "part-2"):
            (won,) = (number for number, created in enumerate(pool.map(partial(create, name), range(8))) if created)
            assert folder.read(name) == str(won).encode() * 1000
    assert folder.names() == ["part-0", "part-1", "part-2"]


def test_many_are_removed_at_once(folder: Folder) -> None:
    for name in ("a/0", "a/1", "a/2", "b"):
        folder.replace(name, b"x")
    folder.remove_all([f"a/{number}" for number in (0, 2, *range(3, 1500))])
    assert folder.names("a") == ["1"] and folder.names() == ["b"]
    folder.remove_all([])


def test_some_bytes_of_a_file_are_read(folder: Folder) -> None:
    folder.replace("a", b"0123456789")
    with folder.open("a") as file:
        file.seek(3)
        assert file.read(4) == b"3456"
    with pytest.raises(FileNotFoundError):
        folder.open("b")


def test_both_stores_heed_the_condition(folder: Folder) -> None:
    make_writable(folder)
    assert folder.names("_job") == []


class Forgetful(LocalFolder):
    """A store that ignores conditions, as some S3 look-alikes do."""

    def create(self, name: str, data: bytes) -> bool:
        self.replace(name, data)
        return True


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    folder = Forgetful(str(tmp_path), tmp_path)
    with pytest.raises(UserError, match=rf"output\.path: the store of {tmp_path} has no conditional puts"):
        make_writable(folder)
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


NAMES = ["a", "b", "s/a", "s/t/b"]
STEPS = st.tuples(st.sampled_from(["create", "replace", "remove", "read"]), st.sampled_from(NAMES), st.binary())


@given(st.lists(STEPS, max_size=9))
@settings(max_examples=15)
def test_a_folder_is_a_dictionary_of_names(folder: Folder, steps: list[tuple[str, str, bytes]]) -> None:
    """As the folder in memory, on which other tests rely, is one."""
    model = MemoryFolder()
    for name in NAMES:
        folder.remove(name)
    for step, name, data in [("read", "a", b""), *steps, *(("read", name, b"") for name in NAMES)]:
        assert outcome(folder, step, name, data) == outcome(model, step, name, data)
        for below in ("", "s", "s/t"):  # at first, the folder does not exist
            assert folder.names(below) == model.names(below)


@pytest.mark.parametrize("url", ["gs://bucket/x", "http://host/x", "hdfs://x", "S4://x"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not supported; use a local path or s3://, or mount") as caught:
        open_folder(url, LOCAL)
    assert str(caught.value).startswith(f"{url}: ")


def test_a_url_names_its_file_system(tmp_path: Path) -> None:
    open_folder(f"file://{tmp_path}/x", LOCAL).replace("a", b"1")
    assert open_folder(str(tmp_path / "x"), LOCAL).read("a") == b"1"
    assert open_folder(str(tmp_path / "x"), LOCAL).url == str(tmp_path / "x")


def test_paths_are_compared_after_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "in.parquet").touch()
    for folder in ("model", "link", "link/out", "."):
        with pytest.raises(ValueError, match=r"output: .* and model.path .*/model overlap; choose another"):
            check_apart("output", tmp_path / folder, {"model.path": [tmp_path / "model"]})
    check_apart("output", tmp_path / "out", {"model.path": [tmp_path / "model"], "data": [tmp_path / "in.parquet"]})
    with pytest.raises(ValueError, match="overlap"):
        check_apart("output", tmp_path, {"data": [tmp_path / "in.parquet"]})
