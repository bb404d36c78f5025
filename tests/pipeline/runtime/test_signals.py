"""Signals: at once, or after a grace for what is at work; a second one, or a lost lease, waits for nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cli_command import wait_until
from moved_clock import Clock

from pipeline.answer.coordinator import Coordinator
from pipeline.commit import lease as leases
from pipeline.commit.lease import EPOCHS, LeaseLost, leased
from pipeline.runtime import signals
from pipeline.runtime.signals import Interrupted, graceful, interrupter, interruptible, shielded
from pipeline.storage.folder import Folder


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which a grace is timed; what is left at work is asked for often."""
    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    monkeypatch.setattr(signals, "POLL_SECONDS", 0.01)
    return clock


class Work:
    """Shards 0 ... count - 1. Each time it is asked what is left, `seconds` pass and `ends` shards end."""

    def __init__(self, clock: Clock, count: int, seconds: float = 0, ends: int = 0) -> None:
        self.coordinator = Coordinator()
        for shard in range(count):
            assert self.coordinator.begin(shard)
        self.clock, self.seconds, self.ends = clock, seconds, ends
        self.asked_from: list[str] = []

    def stop(self) -> set[int]:
        self.asked_from.append(threading.current_thread().name)
        return set(self.coordinator.stop())

    def left(self) -> set[int]:
        self.clock.now += self.seconds
        for shard in list(self.coordinator.working())[: self.ends]:
            self.coordinator.ended(shard, True, 1, 0, 1)
        return set(self.coordinator.working())


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def wait_for_ever() -> None:
    wait_until(lambda: False)


def send_and_wait(number: int = signal.SIGTERM) -> None:
    send(number)
    wait_for_ever()


def interrupted(seconds: float, work: Work, act: Callable[[], None] = send) -> float:
    """Seconds from the signal to that of the grace; 0 if it sent none."""
    began, kill, sent = work.clock.now, os.kill, [work.clock.now]

    def noted(pid: int, number: int) -> None:
        if threading.current_thread().name == "grace":
            sent.append(work.clock.now)
        kill(pid, number)

    def run() -> None:
        with graceful(seconds, work.stop, work.left):
            act()
            wait_for_ever()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", noted)
        with interruptible(), pytest.raises(Interrupted):
            run()
    return (sent + sent)[1] - began


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


def test_what_is_at_work_is_finished_and_nothing_begun(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(clock, 3, seconds=2, ends=1)
    with no_thread_left():
        assert interrupted(8, work) == 6
    assert work.coordinator.read().shards == 3 and not work.coordinator.begin(7)
    assert work.asked_from == ["grace"]  # a handler runs in the middle of anything and must not ask Ray
    assert capsys.readouterr().err == "stopping: up to 8 s for 3 shards at work; a second signal stops at once\n"


def test_work_that_takes_longer_is_dropped_when_time_is_up(clock: Clock) -> None:
    work = Work(clock, 2, seconds=1)
    assert interrupted(5, work) == 5
    assert work.coordinator.read().shards == 0


def test_nothing_at_work_is_not_waited_for(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(clock, 0, seconds=1)
    assert interrupted(9, work) == 0
    assert work.asked_from == ["grace"] and capsys.readouterr().err == ""


def test_no_grace_is_at_once(clock: Clock) -> None:
    work = Work(clock, 2)
    assert interrupted(0, work) == 0
    assert work.asked_from == []


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(clock: Clock, second: int) -> None:
    work = Work(clock, 2)

    def act() -> None:
        send(signal.SIGINT)
        wait_until(lambda: work.asked_from)
        send(second)

    with no_thread_left():
        assert interrupted(60, work, act) == 0


def test_work_that_ends_by_itself_is_told_of_the_signal(clock: Clock) -> None:
    asked: list[float] = []

    def left() -> set[int]:
        asked.append(clock.now)
        return {1}

    with interruptible(), graceful(60, lambda: {1}, left) as grace:
        assert grace.signal is None
        send()
        wait_until(lambda: len(asked) >= 3)
    assert grace.signal == "SIGTERM"
    with pytest.raises(Interrupted), interruptible():  # and grace is over
        send_and_wait()


@pytest.mark.parametrize(
    "block",
    [shielded, lambda: graceful(60, lambda: {1}, lambda: {1})],
    ids=["while clearing up", "without grace"],
)
def test_a_lost_lease_is_lost(local: Folder, monkeypatch: pytest.MonkeyPatch, block: Callable[[], Any]) -> None:
    """Else a run that slept for minutes would go on to report on another's folder."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)

    def run() -> None:
        with leased(local), block():
            [heartbeats] = [thread for thread in threading.enumerate() if thread.name == "lease"]
            local.create(f"{EPOCHS}/000002.json", local.read(f"{EPOCHS}/000001.json"))
            wait_until(lambda: not heartbeats.is_alive())

    with interruptible(), pytest.raises(LeaseLost):
        run()


def test_an_interrupt_from_another_thread_stops_a_grace_that_has_begun(clock: Clock) -> None:
    work = Work(clock, 2)

    def act() -> None:
        send()
        wait_until(lambda: work.asked_from)
        threading.Thread(target=interrupter()).start()

    assert interrupted(60, work, act) == 0


def test_a_signal_while_cleaning_up_waits_for_the_end_of_the_outer_shield() -> None:
    cleaned: list[str] = []

    def clean_up() -> None:
        with shielded():
            with shielded():
                send()
                cleaned.append("inner")
            cleaned.append("outer")
            cleaned.append("end")

    with interruptible():
        with pytest.raises(Interrupted):
            clean_up()
        assert cleaned == ["inner", "outer", "end"]
        with shielded():  # nothing is left over
            pass
