"""Signals: at once, or after a grace for what is at work; a second one, or a lost lease, waits for nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pipeline.commit import lease as leases
from pipeline.commit.lease import EPOCHS, LeaseLost, leased
from pipeline.generate.coordinator import Coordinator
from pipeline.runtime.signals import Interrupted, graceful, interrupter, interruptible, shielded
from pipeline.storage.folder import Folder


class Work:
    """Shards 0 ... count - 1, of which one ends every `seconds`."""

    def __init__(self, count: int, seconds: float) -> None:
        self.coordinator = Coordinator()
        for shard in range(count):
            assert self.coordinator.begin(shard)
        self.seconds = seconds
        self.began = time.monotonic()
        self.asked_from: list[str] = []

    def stop(self) -> set[int]:
        self.asked_from.append(threading.current_thread().name)
        return set(self.coordinator.stop())

    def left(self) -> set[int]:
        for shard in list(self.coordinator.working())[: int((time.monotonic() - self.began) / self.seconds)]:
            self.coordinator.ended(shard, True, 1, 0, 1)
        return set(self.coordinator.working())


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def send_and_wait(number: int = signal.SIGTERM) -> None:
    send(number)
    time.sleep(9)


def interrupted(seconds: float, stop: Callable[[], set[int]], left: Callable[[], set[int]], act: Any = send) -> float:
    """Seconds from the signal to `Interrupted`."""
    began = time.monotonic()

    def run() -> None:
        with graceful(seconds, stop, left):
            act()
            time.sleep(9)

    with interruptible(), pytest.raises(Interrupted):
        run()
    return time.monotonic() - began


@contextmanager
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_outside_of_grace_a_signal_is_an_interrupt_at_once(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=signal.Signals(number).name), interruptible():
        send_and_wait(number)
    assert signal.getsignal(number) is before


def test_what_is_at_work_is_finished_and_nothing_begun(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(3, 0.3)
    with no_thread_left():
        assert 0.2 < interrupted(8, work.stop, work.left) < 4
    assert work.coordinator.read().shards == 3 and not work.coordinator.begin(7)
    assert work.asked_from == ["grace"]  # a handler runs in the middle of anything and must not ask Ray
    assert capsys.readouterr().err == "stopping: up to 8 s for 3 shards at work; a second signal stops at once\n"


def test_work_that_takes_longer_is_dropped_when_time_is_up() -> None:
    work = Work(2, 60)
    assert 0.5 <= interrupted(0.5, work.stop, work.left) < 3
    assert work.coordinator.read().shards == 0


def test_nothing_at_work_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(0, 1)
    assert interrupted(9, work.stop, work.left) < 2
    assert capsys.readouterr().err == ""


def test_no_grace_is_at_once() -> None:
    work = Work(2, 60)
    assert interrupted(0, work.stop, work.left) < 0.5
    assert work.asked_from == []


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(second: int) -> None:
    work = Work(2, 60)

    def act() -> None:
        send(signal.SIGINT)
        time.sleep(0.5)
        send(second)

    with no_thread_left():
        assert interrupted(60, work.stop, work.left, act) < 2


def test_work_that_ends_by_itself_is_told_of_the_signal() -> None:
    with interruptible(), graceful(60, lambda: {1}, lambda: {1}) as grace:
        assert grace.signal is None
        send()
        time.sleep(0.5)
    assert grace.signal == "SIGTERM"
    with pytest.raises(Interrupted), interruptible():  # and grace is over
        send_and_wait()


@pytest.mark.parametrize(
    ("block", "seconds"),
    [(shielded, 0.5), (lambda: graceful(60, lambda: {1}, lambda: {1}), 9)],
    ids=["while clearing up", "without grace"],
)
def test_a_lost_lease_is_lost(
    local: Folder, monkeypatch: pytest.MonkeyPatch, block: Callable[[], Any], seconds: float
) -> None:
    """Else a run that slept for minutes would go on to report on another's folder."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    began = time.monotonic()

    def run() -> None:
        with leased(local), block():
            local.create(f"{EPOCHS}/000002.json", local.read(f"{EPOCHS}/000001.json"))
            time.sleep(seconds)

    with interruptible(), pytest.raises(LeaseLost):
        run()
    assert time.monotonic() - began < 2


def test_an_interrupt_from_another_thread_stops_a_grace_that_has_begun() -> None:
    work = Work(2, 60)

    def act() -> None:
        send()
        timer = threading.Timer(0.3, interrupter())
        timer.start()

    assert interrupted(60, work.stop, work.left, act) < 3


def test_a_job_in_a_thread_is_interrupted_at_the_end_of_a_block_and_not_after_the_job() -> None:
    reached: list[str] = []

    def run() -> None:
        try:
            with interruptible():
                interrupt = interrupter()
                interrupt()
                with shielded():
                    reached.append("in the shield")
                reached.append("never")
        except Interrupted:
            interrupt()
        with interruptible(), shielded():
            reached.append("in the next job")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert reached == ["in the shield", "in the next job"]


def test_a_signal_while_cleaning_up_waits_for_the_end_of_the_outer_shield() -> None:
    cleaned: list[str] = []

    def clean_up() -> None:
        with shielded():
            with shielded():
                send()
                time.sleep(0.1)
                cleaned.append("inner")
            cleaned.append("outer")
            time.sleep(0.1)
            cleaned.append("end")

    with interruptible():
        with pytest.raises(Interrupted):
            clean_up()
        assert cleaned == ["inner", "outer", "end"]
        with shielded():  # nothing is left over
            pass
