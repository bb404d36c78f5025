"""A kill of each kind at a moment that the seed draws; `make soak` runs many. The driver's is in test_job.py too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[1] / "soak.py"


FAULTS = ["actor", "prepare", "raylet", "driver"]


def test_whoever_is_killed_every_row_is_answered_once() -> None:
    """In a process of its own: its Ray must not meet the other tests'."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--faults", ",".join(FAULTS), "--trials", "1", "--minutes", "5", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["faults"]
    assert list(found) == FAULTS
    for row in found.values():
        assert (row["trials"], row["rows lost"], row["rows repeated"], row["parts identical"]) == (1, 0, 0, 1)
