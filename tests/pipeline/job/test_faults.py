"""Faults at moments drawn from a seed. `make faults` and `make soak` run many such trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import faults
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_bench import Bench, digests
from in_process import run_in_process
from process_kills import kill_worker

from pipeline.config.job import StorageConfig

SOAK = Path(__file__).parents[2] / "soak.py"
QUICK = ("kill", "poison", "twice")  # the others: make test-slow


@pytest.mark.ray
@pytest.mark.slow
def test_every_row_is_answered_once_though_a_prepare_worker_is_killed() -> None:
    """In a process of its own, because it starts Ray. A kill that hits no process is tried again."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--faults", "prepare", "--trials", "1", "--minutes", "5", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(done.stdout.splitlines()[-1])["faults"]["prepare"]
    assert (row["trials"], row["rows lost"], row["rows repeated"], row["parts identical"]) == (1, 0, 0, 1)


@pytest.fixture(scope="module")
def commands(s3: StorageConfig, tmp_path_factory: pytest.TempPathFactory) -> faults.Bench:
    """Of 800 rows, for the command in processes of its own."""
    assert s3.endpoint_url
    found = faults.Bench(tmp_path_factory.mktemp("faults"), repetitions=5, limit=300, at_once=1, rows=800)
    found.bucket = s3.endpoint_url
    return found


@pytest.mark.ray
@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in faults.FAULTS]
)
def test_a_fault_loses_repeats_and_falsifies_no_row(fault: str, commands: faults.Bench) -> None:
    result = commands.run(faults.OURS, fault, 2, seed=7)
    assert result.ended and not result.missed, result
    assert (result.lost, result.repeated, result.falsified, result.unreadable) == (0, 0, 0, 0), result
    assert result.told == (fault == "poison"), result
    if fault == "twice":
        assert sorted(result.statuses, key=str) == [0, 5], result


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


def test_what_a_consumer_loses_is_counted(tmp_path: Path) -> None:
    trial = faults.Trial(
        faults.Bench(tmp_path, 1, 1, 1, rows=80), faults.Result(faults.OURS, "kill", 0, 0), tmp_path / "a"
    )
    rows = [{"id": faults.row_id(row), "generated_text": faults.reply(faults.prompt(row))} for row in range(80)]
    rows[3]["generated_text"] = "another text"
    rows[4]["generated_text"] = None
    Path(trial.output).mkdir()
    for name, of_part in (("a", rows[:40]), ("b", rows[39:60]), ("_hidden", rows[60:])):
        pq.write_table(pa.Table.from_pylist(of_part), f"{trial.output}/{name}.parquet")
    Path(trial.output, "c.parquet").write_bytes(b"PAR1")
    trial.count()
    found = trial.result
    assert (found.lost, found.repeated, found.falsified, found.unreadable, found.told) == (20, 1, 1, 1, 1)
    assert not found.ended
