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

from pipeline.config.job import StorageConfig
from pipeline.incremental import ledger as ledgers
from pipeline.incremental.ledger import (
    LEDGER,
    ConcurrentRun,
    Ledger,
    LedgerRun,
    claim_name,
    compact,
    end_name,
    new_files,
    print_ledger,
)
from pipeline.input.files import InputFile
from pipeline.input.shards import cut_shards
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


def run_over(root: Folder, *urls: str, state: ledgers.State = "success", **of_file: Any) -> LedgerRun:
    """A run from its claim to its end."""
    run = ledgers.claim(root, ledgers.read(root), manifest(*urls, **of_file))
    return run if state == "unfinished" else ledgers.end(root, run, state, "why not" if state == "abandoned" else "")


def test_a_ledger_is_read_as_written(root: Folder) -> None:
    assert ledgers.read(root) == Ledger() and not root.names(ledgers.LEDGER)
    first = run_over(root, "a", "b")
    second = run_over(root, "c", state="abandoned")
    third = run_over(root, "c", state="unfinished")
    assert [run.number for run in (first, second, third)] == [1, 2, 3]
    found = ledgers.read(root)
    assert found.runs == (first, second, third) and root.names(ledgers.LEDGER)
    assert (first.rows, first.state, second.why, third.state) == (10, "success", "why not", "unfinished")
    assert found.last == third and found.last_success == first


def test_of_two_concurrent_claims_one_gets_the_number(root: Folder) -> None:
    before = ledgers.read(root)
    won = ledgers.claim(root, before, manifest("a"))
    with pytest.raises(ConcurrentRun, match="run 1 was begun by another command"):
        ledgers.claim(root, before, manifest("a"))
    assert ledgers.read(root).runs == (won,)


def test_the_first_end_of_a_run_is_final(root: Folder) -> None:
    for first, second in (("success", "abandoned"), ("abandoned", "success"), ("success", "success")):
        run = run_over(root, "a", state="unfinished")
        ended = ledgers.end(root, run, first, "one")  # type: ignore[arg-type]
        assert ledgers.end(root, run, second, "two") == ended  # type: ignore[arg-type]
        assert ledgers.read(root).last == ended and ended.state == first


def test_a_repeated_claim_is_recognized_as_ours() -> None:
    class Forgetful(MemoryFolder):
        def create(self, name: str, data: bytes) -> bool:
            return super().create(name, data) and super().create(name, data)

    root = Forgetful()
    assert ledgers.claim(root, Ledger(), manifest("a")) == ledgers.read(root).last


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    root = MemoryFolder()
    dates = ["2026-11-20T16:40:05Z", "2026-11-20T16:40:05Z", "2026-11-19T00:00:00Z", "2026-11-20T16:40:05Z"]
    for date in dates:
        monkeypatch.setattr(ledgers, "_now", lambda date=date: date)
        run_over(root, date)
    date = "2026-11-20T16-40-05Z"
    runs = ledgers.read(root).runs
    assert [run.folder for run in runs] == [date, f"{date}-2", "2026-11-19T00-00-00Z", f"{date}-3"]
    assert [run.number for run in runs] == [1, 2, 3, 4]


def test_reading_stays_cheap_with_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads the ledger as an incremental run does; the copy of earlier records may be damaged or gone."""
    reads = 0

    class Counting(MemoryFolder):
        def read(self, name: str) -> bytes:
            nonlocal reads
            reads += 1
            return super().read(name)

    root = Counting()
    monkeypatch.setattr(ledgers, "COMPACT_EVERY", 10)
    written: list[LedgerRun] = []
    for number in range(1, 45):
        reads = 0
        found = ledgers.read(root)
        assert reads <= 2 * 10 + 1
        assert list(found.runs) == written
        compact(root, found)
        run = ledgers.claim(root, found, manifest(f"file-{number}"))
        written.append(ledgers.end(root, run, "abandoned" if number % 7 == 0 else "success", ""))
    (copy,) = (name for name in root.names(LEDGER) if name.startswith("through-"))
    assert copy == "through-000040.json"
    for damage in (b"{", b"[]", b"[1]", b"3"):
        root.replace(f"{LEDGER}/{copy}", damage)
        assert list(ledgers.read(root).runs) == written
    root.remove(f"{LEDGER}/{copy}")
    assert list(ledgers.read(root).runs) == written


def test_new_files_are_those_of_no_successful_run(root: Folder) -> None:
    run_over(root, "a")
    run_over(root, "b", state="abandoned")
    listed = {"b": (7, "1"), "c": (7, "1"), "a": (7, "1")}
    assert list(new_files(listed, ledgers.read(root), "error").items()) == [("b", (7, "1")), ("c", (7, "1"))]
    assert new_files({}, ledgers.read(root), "error") == {}  # gone since is fine


@pytest.mark.parametrize("now", [(8, "1"), (7, "2")])
def test_a_changed_file_follows_input_changed(now: tuple[int, str]) -> None:
    root = MemoryFolder()
    run_over(root, "x")
    run_over(root, "a")
    ledger = ledgers.read(root)
    with pytest.raises(ValueError, match=rf"^a: changed since run 2 .* \(7 bytes then, {now[0]} now\); .*reprocess"):
        new_files({"a": now}, ledger, "error")
    assert new_files({"a": now}, ledger, "ignore") == {}
    assert new_files({"a": now}, ledger, "reprocess") == {"a": now}
    run_over(root, "a", size=now[0], version=now[1])
    for changed in ("error", "reprocess"):  # it is the latest answer that counts
        assert new_files({"a": now}, ledgers.read(root), changed) == {}


def test_a_file_that_had_no_rows_is_new_once_it_has_some() -> None:
    root = MemoryFolder()
    empty = InputFile("empty", 0, "1", (), ())
    both = manifest("a")
    run = ledgers.claim(root, ledgers.read(root), replace(both, files=[*both.files, empty]))
    ledgers.end(root, run, "success")
    for changed in ("error", "reprocess", "ignore"):
        assert new_files({"a": (7, "1"), "empty": (0, "1")}, ledgers.read(root), changed) == {}
        assert new_files({"a": (7, "1"), "empty": (9, "2")}, ledgers.read(root), changed) == {"empty": (9, "2")}


def test_a_file_uploaded_again_with_the_same_bytes_is_not_new(tmp_path: Path) -> None:
    root, path = MemoryFolder(), tmp_path / "a.parquet"
    path.write_bytes(b"content")
    url = str(path)
    pinned = with_digests([InputFile(url, 7, str(path.stat().st_mtime_ns), (5,), (10,))])
    run = ledgers.claim(root, ledgers.read(root), replace(manifest(url), files=pinned))
    ledgers.end(root, run, "success")
    ledger = ledgers.read(root)
    os.utime(path, ns=(1, 1))
    assert new_files({url: (7, "1")}, ledger, "error") == {}
    assert new_files({url: (7, "1")}, ledger, "reprocess") == {}
    path.write_bytes(b"Content")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="changed since run 1 answered it"):
        new_files({url: (7, "1")}, ledger, "error")
    assert new_files({url: (7, "1")}, ledger, "reprocess") == {url: (7, "1")}


def test_a_missing_ledger_record_is_refused() -> None:
    root = MemoryFolder()
    for url in "abc":
        run_over(root, url)
    files = dict(root.files)
    for name, says in (
        (claim_name(2), f"root/{LEDGER}/000002.json: missing; restore it, else files would be answered twice"),
        (claim_name(3), f"root/{LEDGER}/000003.json: missing; restore it, else files would be answered twice"),
        (end_name(2), f"root/{LEDGER}/000002.end.json: missing, although later runs have begun; restore it"),
    ):
        root.remove(name)
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            ledgers.read(root)
        root.files.update(files)
    for damage in (b"{", b"[]", b'{"format": 9}', b'{"format": 3}', b"[" * 100_000):
        for name in (claim_name(3), end_name(3)):
            root.replace(name, damage)
            with pytest.raises(
                ValueError, match=rf"^root/{name}: (not |has format (None|9), but this version of skipdecode reads 3; )"
            ):
                ledgers.read(root)
            root.files.update(files)


def test_the_ledger_is_printed() -> None:
    root = MemoryFolder()
    run_over(root, "a", "b")
    run_over(root, "c", state="abandoned")
    run_over(root, "d")
    ledgers.claim(root, ledgers.read(root), manifest("c"), left=["in/[/b].csv"])
    out = io.StringIO()
    print_ledger(wide_console(out), ledgers.read(root))
    lines = [line.split() for line in out.getvalue().splitlines()]
    runs = ledgers.read(root).runs
    assert lines[2] == ["1", "2", "10", runs[0].folder, runs[0].ended, "success"]
    assert lines[3][:4] == ["2", "1", "5", runs[1].folder] and lines[3][-3:] == ["abandoned:", "why", "not"]
    assert lines[4][:4] == ["3", "1", "5", runs[2].folder]
    assert lines[5][3:6] == [runs[3].folder, "unfinished;", "left"] and lines[5][-1] == "in/[/b].csv"
    assert "3 files and 15 rows answered in 2 runs" in out.getvalue()
