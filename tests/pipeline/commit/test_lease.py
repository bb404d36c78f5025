"""One run at a time: dead holders are replaced, living ones are named, and a run learns that it lost the lease."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
from cli_command import wait_until
from moved_clock import Clock

from pipeline.commit import lease as leases
from pipeline.commit.lease import EPOCHS, Holder, Lease, LeaseHeld, is_dead, this_process
from pipeline.storage.folder import Folder, open_folder

WATCH = 60.0
SOON = 0.02  # seconds between heartbeats that a test waits for


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which a watch is timed. Heartbeats come by the real one."""
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


@pytest.fixture
def folder(local: Folder) -> Folder:
    return local


def never() -> None:
    raise AssertionError("the lease was lost")


def lease(folder: Folder, beat: float = 10.0) -> Lease:
    return Lease(folder, beat=beat, watch=WATCH)


def release(mine: Lease) -> None:
    """Release a lease whose heartbeats come soon: on a slow machine the last one may take a while."""
    mine.beat = 300.0
    mine.release()


def has_stopped() -> bool:
    """Whether no thread writes heartbeats."""
    return not any(thread.name == "lease" for thread in threading.enumerate())


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


def beat(folder: Folder, holder: Holder) -> None:
    """Write the next heartbeat of `holder`."""
    write(folder, replace(holder, counter=held(folder).counter + 1))


def took_over(folder: Folder, clock: Clock) -> float:
    """Seconds until the lease was ours."""
    mine, began = lease(folder), clock.now
    mine.acquire(never)
    seconds = clock.now - began
    assert held(folder).nonce == mine.holder.nonce
    mine.release()
    return seconds


def test_a_lease_is_claimed_renewed_and_given_back(folder: Folder, clock: Clock) -> None:
    mine = lease(folder, SOON)
    mine.acquire(never)
    found = held(folder)
    assert (found.pid, found.nonce) == (os.getpid(), mine.holder.nonce)
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    assert found.started == pytest.approx(since_boot, abs=0.02)
    wait_until(lambda: held(folder).counter >= found.counter + 3, every=0.01)
    assert replace(held(folder), counter=found.counter) == found
    release(mine)
    assert held(folder).released and has_stopped()
    assert took_over(folder, clock) == 0
    assert folder.names(EPOCHS) == ["000002.json"]
    assert folder.names("_job") == folder.names("_job/tmp") == []


@pytest.mark.parametrize("store", ["s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_a_bucket_can_be_leased(store: str, request: pytest.FixtureRequest, clock: Clock) -> None:
    bucket = open_folder(f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue(store))
    mine = lease(bucket, SOON)
    mine.acquire(never)
    wait_until(lambda: held(bucket).counter >= 2, every=0.01)
    mine.beat = 300.0
    clock.in_sleep = lambda: beat(bucket, mine.holder)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on "):
        lease(bucket).acquire(never)
    assert held(bucket).nonce == mine.holder.nonce
    mine.release()
    later = lease(bucket)
    later.acquire(never)
    later.release()
    assert bucket.names(EPOCHS) == ["000002.json"]


@pytest.mark.parametrize("end", ["gone", "zombie", "pid reused"])
def test_a_dead_process_is_replaced_immediately(
    folder: Folder, clock: Clock, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, every=0.01)
    mine = lease(folder).holder
    if end == "gone":
        child.wait()
    holder = replace(mine, started=mine.started - 1000) if end == "pid reused" else replace(mine, pid=child.pid)
    write(folder, replace(holder, nonce="n"))
    with caplog.at_level(logging.WARNING):
        assert took_over(folder, clock) == 0  # not watched
    assert f"process {holder.pid} on" in caplog.text and "which is dead" in caplog.text
    child.wait()


@pytest.mark.parametrize("changes", [{"namespace": "h b pid:[1]"}, {"namespace": ""}])
def test_a_pid_of_another_machine_or_container_is_not_trusted(
    folder: Folder, clock: Clock, changes: dict[str, Any]
) -> None:
    """Names of hosts are not unique, and containers may share one: such a holder is watched like any other."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    write(folder, replace(lease(folder).holder, **{"pid": child.pid, "nonce": "n", **changes}))
    assert took_over(folder, clock) == WATCH


def test_setting_the_clock_does_not_make_a_living_holder_look_dead(
    folder: Folder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil adds the time of boot, which moves with the wall clock; seconds after boot do not."""
    first = lease(folder)
    first.acquire(never)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 1.0)
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    assert not is_dead(held(folder), lease(folder).holder)
    clock.in_sleep = first.renew
    with pytest.raises(LeaseHeld):
        lease(folder).acquire(never)
    first.release()


def test_clocks_that_differ_by_days_do_not_matter(folder: Folder, clock: Clock) -> None:
    """A living holder is not replaced, and a dead one is not waited for any longer."""
    theirs = replace(foreign(folder), since=time.time() + 400 * 86_400)
    write(folder, theirs)
    clock.in_sleep = lambda: beat(folder, theirs)
    with pytest.raises(LeaseHeld):
        lease(folder).acquire(never)
    clock.in_sleep = lambda: None
    assert took_over(folder, clock) == WATCH


def test_a_damaged_lease_is_watched_too(folder: Folder, clock: Clock) -> None:
    for text in (b"{", b"[]", b'{"since": 1e300}', b'{"pid": "x"}', b"\xff", b"[" * 100_000):
        folder.replace(last(folder), text)
        assert took_over(folder, clock) == WATCH


def test_a_living_holder_is_named(folder: Folder, clock: Clock) -> None:
    """Also if its next heartbeat comes at the last moment."""
    mine, theirs, began = lease(folder), foreign(folder), clock.now
    write(folder, theirs)
    clock.in_sleep = lambda: beat(folder, theirs) if clock.now >= began + WATCH else None
    with pytest.raises(LeaseHeld) as caught:
        mine.acquire(never)
    assert str(caught.value) == "process 4321 on elsewhere, since 2023-11-14 22:13:20 UTC"
    mine.release()
    assert held(folder).nonce == "n"


def test_a_lease_released_during_the_watch_is_claimed(folder: Folder, clock: Clock) -> None:
    write(folder, foreign(folder))
    clock.in_sleep = lambda: write(folder, replace(foreign(folder), released=True))
    assert took_over(folder, clock) <= 1


def test_a_lost_lease_is_reported_once(folder: Folder) -> None:
    reports: list[int] = []
    mine = lease(folder, SOON)
    mine.acquire(lambda: reports.append(1))
    own, thief = last(folder), replace(mine.holder, nonce="thief")
    folder.create(f"{EPOCHS}/000002.json", json.dumps(asdict(thief)).encode())
    wait_until(has_stopped, every=0.01)
    assert reports == [1]
    before = folder.read(own)
    mine.release()
    assert held(folder) == thief and folder.read(own) == before


def test_a_short_store_outage_keeps_the_lease(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lease(folder, SOON)
    mine.acquire(never)
    failed: list[str] = []

    def fail(self: Folder, name: str) -> bytes:
        failed.append(name)
        raise OSError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "read", fail)
        wait_until(lambda: len(failed) >= 2, every=0.01)
    counter = held(folder).counter
    wait_until(lambda: held(folder).counter > counter, every=0.01)
    release(mine)


def test_a_repeated_creation_is_recognized_as_ours(
    folder: Folder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a put whose response was lost and learns that the file exists: its own."""
    create = type(folder).create

    def repeated(self: Folder, name: str, data: bytes) -> bool:
        return create(self, name, data) and create(self, name, data)

    monkeypatch.setattr(type(folder), "create", repeated)
    assert took_over(folder, clock) == 0


def test_a_process_that_is_hidden_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose /proc shows users their own processes only."""

    def hidden(*_: int) -> None:
        raise PermissionError

    here = this_process()
    assert not is_dead(here, here)
    monkeypatch.setattr(os, "kill", hidden)
    assert not is_dead(here, here)
