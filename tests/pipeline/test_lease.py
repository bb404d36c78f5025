"""One run at a time: the dead are replaced, the living are named, and who lost the lease is told."""

from __future__ import annotations

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
from pathlib import Path

import psutil
import pytest

from pipeline.config import StorageConfig
from pipeline.lease import LEASE, Holder, Lease, LeaseHeld
from pipeline.storage import Folder, open_folder

BEAT, WATCH = 0.05, 0.4


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_folder(str(tmp_path), StorageConfig())


def never() -> None:
    raise AssertionError("the lease was lost")


def lease(folder: Folder) -> Lease:
    return Lease(folder, beat=BEAT, watch=WATCH)


def held(folder: Folder) -> Holder:
    return Holder(**json.loads(folder.read(LEASE)))


def write(folder: Folder, holder: Holder) -> None:
    folder.replace(LEASE, json.dumps(asdict(holder)).encode())


def foreign(folder: Folder) -> Holder:
    """A holder on a host of which nothing can be known."""
    return replace(lease(folder).holder, host="elsewhere", boot_id="b", pid=4321, nonce="n", since=1_700_000_000.0)


@contextmanager
def beating(folder: Folder, holder: Holder) -> Iterator[None]:
    """Somebody who raises the counter of `holder`."""
    write(folder, holder)
    stop = threading.Event()

    def beat() -> None:
        counter = 0
        while not stop.wait(BEAT):
            counter += 1
            write(folder, replace(holder, counter=counter))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def until(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def took_over(folder: Folder) -> float:
    """Seconds until the lease was ours."""
    mine, began = lease(folder), time.monotonic()
    mine.acquire(never)
    seconds = time.monotonic() - began
    assert held(folder).nonce == mine.holder.nonce
    mine.release()
    return seconds


def test_a_lease_is_taken_kept_and_given_back(folder: Folder) -> None:
    mine = lease(folder)
    mine.acquire(never)
    found = held(folder)
    assert (found.pid, found.nonce, found.counter) == (os.getpid(), mine.holder.nonce, 0)
    assert found.process_start == psutil.Process().create_time()
    until(lambda: held(folder).counter >= 3)
    assert replace(held(folder), counter=0) == found
    mine.release()
    assert folder.names("_job") == []
    time.sleep(3 * BEAT)
    assert folder.names("_job") == []
    assert took_over(folder) < WATCH


@pytest.mark.parametrize("store", ["s3", pytest.param("ceph", marks=pytest.mark.ceph)])
def test_a_bucket_can_be_leased(store: str, request: pytest.FixtureRequest) -> None:
    bucket = open_folder(f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue(store))
    mine = lease(bucket)
    mine.acquire(never)
    until(lambda: held(bucket).counter >= 2)
    with pytest.raises(LeaseHeld):
        lease(bucket).acquire(never)
    mine.release()
    assert bucket.names("_job") == []


def test_a_process_that_is_no_more_is_replaced_at_once(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    write(folder, replace(lease(folder).holder, pid=child.pid, nonce="n"))
    with caplog.at_level(logging.WARNING):
        assert took_over(folder) < WATCH / 2
    assert f"process {child.pid} on" in caplog.text and "which is dead" in caplog.text


def test_a_pid_that_another_process_has_now_is_dead(folder: Folder) -> None:
    mine = lease(folder).holder
    write(folder, replace(mine, process_start=mine.process_start - 1000, nonce="n"))
    assert took_over(folder) < WATCH / 2


def test_a_holder_of_an_earlier_boot_is_dead(folder: Folder) -> None:
    write(folder, replace(lease(folder).holder, boot_id="earlier", nonce="n"))
    assert took_over(folder) < WATCH / 2


def test_a_host_that_stands_still_is_taken_over_after_the_watch(folder: Folder) -> None:
    write(folder, foreign(folder))
    assert WATCH <= took_over(folder) < WATCH + 2


def test_a_lease_that_says_nothing_is_watched_too(folder: Folder) -> None:
    for text in (b"", b"{", b"[]", b'{"host": 1}', b'"x"'):
        folder.replace(LEASE, text)
        assert WATCH <= took_over(folder) < WATCH + 2


def test_a_host_that_moves_is_named(folder: Folder) -> None:
    mine = lease(folder)
    with beating(folder, foreign(folder)):
        with pytest.raises(LeaseHeld) as caught:
            mine.acquire(never)
        assert str(caught.value) == "process 4321 on elsewhere, since 2023-11-14 22:13:20 UTC"
        mine.release()
        assert held(folder).nonce == "n"


def test_a_second_run_of_this_host_waits_for_no_dead_one(folder: Folder) -> None:
    first = lease(folder)
    first.acquire(never)
    second = lease(folder)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on "):
        second.acquire(never)
    assert held(folder).nonce == first.holder.nonce
    first.release()
    second.acquire(never)
    second.release()


def test_a_lease_given_back_under_watch_is_taken(folder: Folder) -> None:
    write(folder, foreign(folder))
    timer = threading.Timer(WATCH / 4, lambda: folder.remove(LEASE))
    timer.start()
    assert took_over(folder) < WATCH
    timer.join()


def test_who_lost_the_lease_is_told_once(folder: Folder) -> None:
    told: list[int] = []
    mine = lease(folder)
    mine.acquire(lambda: told.append(1))
    thief = replace(mine.holder, nonce="thief")
    write(folder, thief)
    until(lambda: told)
    time.sleep(4 * BEAT)
    assert told == [1]
    mine.release()
    assert held(folder) == thief


def test_a_lease_that_was_removed_is_lost(folder: Folder) -> None:
    told: list[int] = []
    mine = lease(folder)
    mine.acquire(lambda: told.append(1))
    folder.remove(LEASE)
    until(lambda: told)
    mine.release()
    assert folder.names("_job") == []


def test_a_store_that_fails_for_a_while_costs_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lease(folder)
    mine.acquire(never)
    failed: list[str] = []

    def fail(self: Folder, name: str) -> bytes:
        failed.append(name)
        raise OSError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "read", fail)
        until(lambda: len(failed) >= 2)
    counter = held(folder).counter
    until(lambda: held(folder).counter > counter)
    mine.release()


def test_of_many_at_once_one_keeps_it(folder: Folder) -> None:
    """All see the same dead holder. One may remove the lease that another has just made; that one is told."""
    write(folder, replace(lease(folder).holder, boot_id="earlier", nonce="n"))
    start = threading.Barrier(4)
    got: list[Lease] = []
    refused: list[Lease] = []
    lost: list[Lease] = []

    def go() -> None:
        mine = lease(folder)
        start.wait()
        try:
            mine.acquire(lambda: lost.append(mine))
        except LeaseHeld:
            refused.append(mine)
        else:
            got.append(mine)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) + len(refused) == 4
    until(lambda: [mine.holder.nonce for mine in got if mine not in lost] == [held(folder).nonce])
    for mine in got:
        mine.release()
    assert folder.names("_job") == []
