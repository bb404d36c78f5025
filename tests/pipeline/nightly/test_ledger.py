"""Ledger records are final, in a folder and in a bucket, and reading them stays cheap."""

from __future__ import annotations

import io
import os
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from memory_folder import MemoryFolder

from pipeline import nightly
from pipeline.commit.claim import LEDGER
from pipeline.commit.lease import LeaseLost
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.shards import cut_shards
from pipeline.nightly import Ledger, Run, compact, new_files, print_ledger
from pipeline.plan.batching import Batching
from pipeline.plan.inputs import with_digests
from pipeline.plan.manifest import Manifest
from pipeline.runtime.wide_console import wide_console
from pipeline.storage.folder import Folder, open_folder


@pytest.fixture(params=["memory", "local", "s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A root that does not exist yet."""
    if request.param == "memory":
        return MemoryFolder()
    if request.param == "local":
        return open_folder(str(tmp_path / "root"), StorageConfig())
    return open_folder(f"s3://bucket/{uuid.uuid4().hex}/root", request.getfixturevalue(request.param))


def manifest(*urls: str, size: int = 7, version: str = "1") -> Manifest:
    files = [InputFile(url, size, version, (2, 3), (10, 10)) for url in urls]
    return Manifest("f" * 64, {}, Batching(1, 1, 1, 1, 1), files, cut_shards(files, 3, 100), pa.schema([]))


def run_over(root: Any, *urls: str, state: Any = "success", **of_file: Any) -> Run:
    """Record how a run ended."""
    ledger = nightly.read(root)
    root.create(nightly.ROOT, b'{"format": 4, "root": "in"}')
    why = "why not" if state == "abandoned" else ""
    return nightly.record(root, ledger, f"folder-{len(ledger.runs)}", state, manifest(*urls, **of_file), why)


def test_a_ledger_is_read_as_written(root: Folder) -> None:
    assert nightly.read(root) == Ledger() and not root.names(LEDGER)
    first = run_over(root, "a", "b")
    second = run_over(root, "c", state="abandoned")
    third = run_over(root, "c")
    assert [run.number for run in (first, second, third)] == [1, 2, 3]
    found = nightly.read(root)
    assert found.runs == (first, second, third) and found.root == "in"
    assert (first.rows, first.state, second.why) == (10, "success", "why not")
    assert found.succeeded == [first, third] and found.last_success == third


def test_of_two_concurrent_records_one_gets_the_number(root: Folder) -> None:
    first = run_over(root, "a")
    before = nightly.read(root)
    won = nightly.record(root, before, "b", "success", manifest("b"))
    for state in ("success", "abandoned"):
        with pytest.raises(LeaseLost, match="another command has recorded run 2 meanwhile, so c does not count"):
            nightly.record(root, before, "c", state, manifest("c"))
    assert nightly.read(root).runs == (first, won)


def test_a_repeated_record_is_recognized_as_ours() -> None:
    class Forgetful(MemoryFolder):
        def create(self, name: str, data: bytes) -> bool:
            return super().create(name, data) and super().create(name, data)

    root = Forgetful()
    assert run_over(root, "a") == nightly.read(root).last_success  # type: ignore[arg-type]


def test_dated_folders_without_a_record_are_unfinished(root: Folder) -> None:
    done = nightly.record(root, nightly.read(root), "2026-11-20T16-40-05Z", "success", manifest("a"))
    root.create(nightly.ROOT, b'{"format": 4, "root": "in"}')
    for name in (done.folder, "2026-11-21T16-40-05Z-2", "2026-11-21T16-40-05Z", "notes"):
        root.create(f"{name}/_job/job.json", b"{}")
    root.create("2026-11-22T16-40-05Z/_job/lease/000001.json", b"{}")  # killed before its plan was there
    assert nightly.unfinished(root, nightly.read(root)) == ["2026-11-21T16-40-05Z", "2026-11-21T16-40-05Z-2"]
    assert "2026-11-22T16-40-05Z" in root.folders()


def test_reading_stays_cheap_with_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads the ledger as an incremental run does; the copy of earlier records may be damaged or gone."""
    reads = 0

    class Counting(MemoryFolder):
        def read(self, name: str) -> bytes:
            nonlocal reads
            reads += 1
            return super().read(name)

    root = Counting()
    monkeypatch.setattr(nightly, "COMPACT_EVERY", 10)
    written: list[Run] = []
    for number in range(1, 45):
        reads = 0
        found = nightly.read(root)
        assert reads <= 10 + 2
        assert list(found.runs) == written
        compact(root, found)
        written.append(run_over(root, f"file-{number}", state="abandoned" if number % 7 == 0 else "success"))
    (copy,) = (name for name in root.names(LEDGER) if name.startswith("through-"))
    assert copy == "through-000040.json"
    for damage in (b"{", b"[]", b"[1]", b"3"):
        root.replace(f"{LEDGER}/{copy}", damage)
        assert list(nightly.read(root).runs) == written
    root.remove(f"{LEDGER}/{copy}")
    assert list(nightly.read(root).runs) == written


def test_new_files_are_those_of_no_successful_run(root: Folder) -> None:
    run_over(root, "a")
    run_over(root, "b", state="abandoned")
    listed = {"b": (7, "1"), "c": (7, "1"), "a": (7, "1")}
    assert list(new_files(listed, nightly.read(root), "error").items()) == [("b", (7, "1")), ("c", (7, "1"))]
    assert new_files({}, nightly.read(root), "error") == {}  # gone since is fine


@pytest.mark.parametrize("now", [(8, "1"), (7, "2")])
def test_a_changed_file_follows_input_changed(now: tuple[int, str]) -> None:
    root = MemoryFolder()
    run_over(root, "x")
    run_over(root, "a")
    ledger = nightly.read(root)
    with pytest.raises(ValueError, match=rf"^a: changed since run 2 .* \(7 bytes then, {now[0]} now\); .*reprocess"):
        new_files({"a": now}, ledger, "error")
    assert new_files({"a": now}, ledger, "ignore") == {}
    assert new_files({"a": now}, ledger, "reprocess") == {"a": now}
    run_over(root, "a", size=now[0], version=now[1])
    for changed in ("error", "reprocess"):  # it is the latest answer that counts
        assert new_files({"a": now}, nightly.read(root), changed) == {}


def test_a_file_that_had_no_rows_is_new_once_it_has_some() -> None:
    root = MemoryFolder()
    empty = InputFile("empty", 0, "1", (), ())
    both = manifest("a")
    nightly.record(root, Ledger(), "x", "success", replace(both, files=[*both.files, empty]))
    root.create(nightly.ROOT, b'{"format": 4, "root": "in"}')
    for changed in ("error", "reprocess", "ignore"):
        assert new_files({"a": (7, "1"), "empty": (0, "1")}, nightly.read(root), changed) == {}
        assert new_files({"a": (7, "1"), "empty": (9, "2")}, nightly.read(root), changed) == {"empty": (9, "2")}


def test_a_file_uploaded_again_with_the_same_bytes_is_not_new(tmp_path: Path) -> None:
    root, path = MemoryFolder(), tmp_path / "a.parquet"
    path.write_bytes(b"content")
    url = str(path)
    pinned = with_digests([InputFile(url, 7, str(path.stat().st_mtime_ns), (5,), (10,))])
    nightly.record(root, Ledger(), "x", "success", replace(manifest(url), files=pinned))
    root.create(nightly.ROOT, b'{"format": 4, "root": "in"}')
    ledger = nightly.read(root)
    os.utime(path, ns=(1, 1))
    assert new_files({url: (7, "1")}, ledger, "error") == {}
    assert new_files({url: (7, "1")}, ledger, "reprocess") == {}
    path.write_bytes(b"Content")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="changed since run 1 answered it"):
        new_files({url: (7, "1")}, ledger, "error")
    assert new_files({url: (7, "1")}, ledger, "reprocess") == {url: (7, "1")}


def test_a_missing_or_damaged_record_is_refused() -> None:
    root: Any = MemoryFolder()
    for url in "abc":
        run_over(root, url)
    files = dict(root.files)
    first, last, at = f"{LEDGER}/000001.json", f"{LEDGER}/000003.json", nightly.ROOT
    for name in (first, at):
        root.remove(name)
        says = f"root/{name}: missing; restore it, else files would be answered twice"
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            nightly.read(root)
        root.files.update(files)
    for damage in (b"{", b"[]", b'{"format": 9}', b'{"format": 4}', b"[" * 100_000):
        root.replace(last, damage)
        with pytest.raises(
            ValueError, match=rf"^root/{last}: (not |has format (None|9), but this version of skipdecode reads 4; )"
        ):
            nightly.read(root)
        root.files.update(files)


def test_the_ledger_is_printed(root: Folder) -> None:
    run_over(root, "a", "b")
    run_over(root, "c", state="abandoned")
    nightly.record(root, nightly.read(root), "third", "success", manifest("b", version="2"), left=["in/[/b].csv"])
    out = io.StringIO()
    print_ledger(wide_console(out), root, StorageConfig())
    lines = [line.split() for line in out.getvalue().splitlines()]
    runs = nightly.read(root).runs
    assert lines[2] == ["1", "2", "10", runs[0].folder, runs[0].ended, "success"]
    assert lines[3][:4] == ["2", "1", "5", runs[1].folder] and lines[3][-3:] == ["abandoned:", "why", "not"]
    assert lines[4][3:7] == ["third", runs[2].ended, "success;", "left"] and lines[4][-1] == "in/[/b].csv"
    assert "2 files and 15 rows answered in 2 runs" in out.getvalue()
