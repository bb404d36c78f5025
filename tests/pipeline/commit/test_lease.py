"""One run at a time: dead holders are replaced, living ones are named, and a run learns that it lost the lease."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
from cli_command import wait_until

from pipeline.commit.lease import EPOCHS, Holder, Lease, LeaseHeld, is_dead, this_process
from pipeline.storage.concurrency import repeating
from pipeline.storage.folder import Folder, open_folder

BEAT, WATCH = 0.05, 0.4


@pytest.fixture
def folder(local: Folder) -> Folder:
    return local


def never() -> None:
    raise AssertionError("the lease was lost")


def lease(folder: Folder) -> Lease:
    return Lease(folder, beat=BEAT, watch=WATCH)


def last(folder: Folder) -> str:
    return f"{EPOCHS}/{max(folder.names(EPOCHS), default='000001.json')}"


def held(folder: Folder) -> Holder:
    return Holder(**json.loads(folder.read(last(folder))))


def write(folder: Folder, holder: Holder) -> None:
    """Write the file of the last epoch as this holder would."""
    folder.replace(last(folder), json.dumps(asdict(holder)).encode())


def foreign(folder: Folder) -> Holder:
    """A holder on another host."""
    there = {"host": "elsewhere", "namespace": "elsewhere b pid:[1]", "pid": 4321, "since": 1_700_000_000.0}
    return replace(lease(folder).holder, nonce="n", **there)


@contextmanager
def beating(folder: Folder, holder: Holder) -> Iterator[None]:
    """A thread that writes the heartbeats of `holder`."""
    write(folder, holder)
    beats = itertools.count(1)
    with repeating(lambda: write(folder, replace(holder, counter=next(beats))), BEAT, "beats"):
        yield


def took_over(folder: Folder) -> float:
    """Seconds until the lease was ours."""
    mine, began = lease(folder), time.monotonic()
    mine.acquire(never)
    seconds = time.monotonic() - began
    assert held(folder).nonce == mine.holder.nonce
    mine.release()
    return seconds


def test_a_lease_is_claimed_renewed_and_given_back(folder: Folder) -> None:
    mine = lease(folder)
    mine.acquire(never)
    found = held(folder)
    assert (found.pid, found.nonce, found.counter) == (os.getpid(), mine.holder.nonce, 0)
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    assert found.started == pytest.approx(since_boot, abs=0.02)
    wait_until(lambda: held(folder).counter >= 3, 5, 0.01)
    assert replace(held(folder), counter=0) == found
    mine.release()
    given_back = held(folder)
    assert given_back.released
    time.sleep(3 * BEAT)
    assert held(folder) == given_back
    assert took_over(folder) < WATCH
    assert folder.names(EPOCHS) == ["000002.json"]
    assert folder.names("_job") == folder.names("_job/tmp") == []


@pytest.mark.parametrize("store", ["s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_a_bucket_can_be_leased(store: str, request: pytest.FixtureRequest) -> None:
    bucket = open_folder(f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue(store))

    def slow_lease() -> Lease:
        return Lease(bucket, beat=0.5, watch=4)

    mine = slow_lease()
    mine.acquire(never)
    wait_until(lambda: held(bucket).counter >= 2, 5, 0.01)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on "):
        slow_lease().acquire(never)
    assert held(bucket).nonce == mine.holder.nonce
    mine.release()
    later = slow_lease()
    later.acquire(never)
    later.release()
    assert bucket.names(EPOCHS) == ["000002.json"]


@pytest.mark.parametrize("end", ["gone", "zombie", "pid reused"])
def test_a_dead_process_is_replaced_immediately(folder: Folder, caplog: pytest.LogCaptureFixture, end: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, 5, 0.01)
    mine = lease(folder).holder
    if end == "gone":
        child.wait()
    holder = replace(mine, started=mine.started - 1000) if end == "pid reused" else replace(mine, pid=child.pid)
    write(folder, replace(holder, nonce="n"))
    with caplog.at_level(logging.WARNING):
        assert took_over(folder) < WATCH  # not watched
    assert f"process {holder.pid} on" in caplog.text and "which is dead" in caplog.text
    child.wait()


@pytest.mark.parametrize("changes", [{"namespace": "h b pid:[1]"}, {"namespace": ""}])
def test_a_pid_of_another_machine_or_container_is_not_trusted(folder: Folder, changes: dict[str, Any]) -> None:
    """Names of hosts are not unique, and containers may share one: such a holder is watched like any other."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    write(folder, replace(lease(folder).holder, **{"pid": child.pid, "nonce": "n", **changes}))
    assert WATCH <= took_over(folder) < WATCH + 2


def test_setting_the_clock_does_not_make_a_living_holder_look_dead(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil adds the time of boot, which moves with the wall clock; seconds after boot do not."""
    first = lease(folder)
    first.acquire(never)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 1.0)
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    assert not is_dead(held(folder), lease(folder).holder)
    with pytest.raises(LeaseHeld):
        lease(folder).acquire(never)
    first.release()


def test_clocks_that_differ_by_days_do_not_matter(folder: Folder) -> None:
    """A living holder is not replaced, and a dead one is not waited for any longer."""
    theirs = replace(foreign(folder), since=time.time() + 400 * 86_400)
    with beating(folder, theirs), pytest.raises(LeaseHeld):
        lease(folder).acquire(never)
    assert WATCH <= took_over(folder) < WATCH + 2


def test_a_damaged_lease_is_watched_too(folder: Folder) -> None:
    for text in (b"{", b"[]", b'{"since": 1e300}', b'{"pid": "x"}', b"\xff", b"[" * 100_000):
        folder.replace(last(folder), text)
        assert WATCH <= took_over(folder) < WATCH + 2


def test_a_living_holder_is_named(folder: Folder) -> None:
    mine = lease(folder)
    with beating(folder, foreign(folder)):
        with pytest.raises(LeaseHeld) as caught:
            mine.acquire(never)
        assert str(caught.value) == "process 4321 on elsewhere, since 2023-11-14 22:13:20 UTC"
        mine.release()
        assert held(folder).nonce == "n"


def test_a_lease_released_during_the_watch_is_claimed(folder: Folder) -> None:
    write(folder, foreign(folder))
    timer = threading.Timer(WATCH / 4, lambda: write(folder, replace(foreign(folder), released=True)))
    timer.start()
    assert took_over(folder) < WATCH
    timer.join()


def test_a_lost_lease_is_reported_once(folder: Folder) -> None:
    reports: list[int] = []
    mine = lease(folder)
    mine.acquire(lambda: reports.append(1))
    own, thief = last(folder), replace(mine.holder, nonce="thief")
    folder.create(f"{EPOCHS}/000002.json", json.dumps(asdict(thief)).encode())
    wait_until(lambda: reports, 5, 0.01)
    before = folder.read(own)
    time.sleep(4 * BEAT)
    assert reports == [1]
    mine.release()
    assert held(folder) == thief and folder.read(own) == before


def test_a_short_store_outage_keeps_the_lease(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lease(folder)
    mine.acquire(never)
    failed: list[str] = []

    def fail(self: Folder, name: str) -> bytes:
        failed.append(name)
        raise OSError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "read", fail)
        wait_until(lambda: len(failed) >= 2, 5, 0.01)
    counter = held(folder).counter
    wait_until(lambda: held(folder).counter > counter, 5, 0.01)
    mine.release()


def test_a_repeated_creation_is_recognized_as_ours(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats a put whose response was lost and learns that the file exists: its own."""
    create = type(folder).create

    def repeated(self: Folder, name: str, data: bytes) -> bool:
        return create(self, name, data) and create(self, name, data)

    monkeypatch.setattr(type(folder), "create", repeated)
    assert took_over(folder) < WATCH


def test_a_process_that_is_hidden_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose /proc shows users their own processes only."""

    def hidden(*_: int) -> None:
        raise PermissionError

    here = this_process()
    assert not is_dead(here, here)
    monkeypatch.setattr(os, "kill", hidden)
    assert not is_dead(here, here)
