"""The count of rows in flight comes to its end, and finds pages worth what they are for."""

from __future__ import annotations

import json
from typing import Any

import pages
import pytest


@pytest.mark.slow
def test_pages_hold_more_rows_than_slots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["pages.py", "--gib", "1", "--rows", "24", "--speeds", "3"])
    pages.main()
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["3x"]
    shaped, slots = (f"slots {name}: steps" for name in ("in the schedule's shape", "of full length"))
    assert told["pages: steps"] < told[shaped] < told[slots]
