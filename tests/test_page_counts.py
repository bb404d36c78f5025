"""The count of rows in flight comes to its end, and finds pages worth what they are for."""

from __future__ import annotations

import json
from typing import Any

import page_counts
import pytest


@pytest.mark.slow
def test_pages_hold_more_rows_than_slots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["page_counts.py", "--gib", "1", "--rows", "24", "--speeds", "3"])
    page_counts.main()
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["3x"]
    shaped, slots = (f"slots {name}: steps" for name in ("in the schedule's shape", "of full length"))
    assert told["pages: steps"] < told[shaped] < told[slots]
