"""A process is killed at a moment drawn from a seed. `make soak` runs many such trials."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_bench import ROWS, SHARDS, Bench, Trial, digests
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


def lose(output: Path) -> None:
    (output / "part-000003.parquet").unlink()


def repeat(output: Path) -> None:
    (output / "part-000003.parquet").write_bytes((output / "part-000004.parquet").read_bytes())


def differ(output: Path) -> None:
    table = pq.read_table(output / "part-000003.parquet")
    pq.write_table(table, output / "part-000003.parquet", compression="none")


def unfinish(output: Path) -> None:
    (output / "_SUCCESS").unlink()


PER = ROWS // SHARDS


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda output: None, (0, 0, True, True)),
        (lose, (PER, 0, False, False)),
        (repeat, (PER, PER, False, False)),
        (differ, (0, 0, False, False)),
        (unfinish, (0, 0, True, False)),
    ],
    ids=["none", "lost", "repeated", "differs", "unfinished"],
)
def test_what_is_wrong_with_an_output_is_seen(
    bench: Bench, harm: Callable[[Path], None], expected: tuple[int, int, bool, bool]
) -> None:
    job = bench.job()
    output = Path(job.output.path)
    (output / "_job" / "commits").mkdir(parents=True)
    (output / "_SUCCESS").touch()
    for shard in range(SHARDS):
        (output / "_job" / "commits" / f"{shard:06d}.json").touch()
        rows = pa.table({"id": [f"row-{shard * PER + row}" for row in range(PER)]})
        pq.write_table(rows, output / f"part-{shard:06d}.parquet")
    bench.undisturbed = digests(bench.output(job))
    harm(output)
    trial = bench.look(job, Trial("actor", 0, hit=True))
    assert (trial.lost, trial.repeated, trial.identical, trial.passed) == expected
