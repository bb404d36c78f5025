"""Progress lines: how often, of which rows, and without control characters."""

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from pipeline.runtime import announce
from pipeline.runtime.announce import EscapingFormatter, RowProgress, announce_checks, announced


def test_rows_that_ran_are_counted_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 9.0, 10.0, 10.0, 19.0, 20.0, 20.0, 30.0, 30.0])
    own_clock = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(announce, "time", own_clock)
    progress = RowProgress("2x", 1000)
    for running in ([0, 1], [1, 2, 3], [4], [4, 5], []):
        progress(running)
    assert capsys.readouterr().err.splitlines() == [f"2x: {done} of 1,000 rows" for done in (1, 4, 6)]


def test_checks_are_announced_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_checks("reading")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    announce_checks("reading again")
    assert capsys.readouterr().err == "reading again\n"


def test_a_phase_is_named_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]

    with announced("reading a little"):
        [timer] = timers()
    timer.join()
    monkeypatch.setattr(announce, "QUIET_SECONDS", 0.0)
    with announced("reading much"):
        for timer in timers():
            timer.join()
    assert capsys.readouterr().err == "reading much ...\n"


def test_lines_and_log_records_show_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    announce.announce("clear\x1b[2J\rwarning")
    assert capsys.readouterr().err == "clear\\x1b[2J\\rwarning\n"
    try:
        raise ValueError("\u202etxt")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "id %s\n", ("\x9b1",), sys.exc_info())
    text = EscapingFormatter("%(message)s").format(record)
    assert text.startswith("id \\u009b1\n") and text.endswith("ValueError: \\u202etxt")
