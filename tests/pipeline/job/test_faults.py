"""A process is killed at a moment drawn from a seed. `make soak` runs many such trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fault_bench import Bench, digests
from in_process import run_in_process
from process_kills import kill_worker

from pipeline.config.job import StorageConfig

SOAK = Path(__file__).parents[2] / "soak.py"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("faults", [["raylet"], ["prepare", "driver"]], ids=",".join)
def test_every_row_is_answered_once_whatever_is_killed(faults: list[str]) -> None:
    """In a process of its own, because it starts clusters. A kill that hits no process is tried again."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--faults", ",".join(faults), "--trials", "1", "--minutes", "5", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["faults"]
    assert list(found) == faults
    for row in found.values():
        assert (row["trials"], row["rows lost"], row["rows repeated"], row["parts identical"]) == (1, 0, 0, 1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    return Bench(folder, str(folder / "outputs"), StorageConfig())


def test_every_row_is_answered_once_though_an_actor_is_killed(own_ray: None, bench: Bench) -> None:
    job = bench.job()
    run_in_process(job)
    bench.undisturbed = digests(bench.output(job))
    for seed in (11, 5, 2):  # after 1, 2 and 6 of 12 parts; a kill that comes before or after the job does not count
        trial = kill_worker(bench, "actor", seed)
        assert trial.passed, trial
        if trial.hit:
            return
    pytest.fail("no kill hit an actor at work")
