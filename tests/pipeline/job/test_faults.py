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

from pipeline.config.job import StorageConfig

SOAK = Path(__file__).parents[2] / "soak.py"


@pytest.mark.ray
@pytest.mark.parametrize(
    "faults",
    [
        ["actor"],
        pytest.param(["raylet"], marks=pytest.mark.slow),
        pytest.param(["prepare", "driver"], marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_whoever_is_killed_every_row_is_answered_once(faults: list[str]) -> None:
    """In a process of its own: its Ray must not meet the other tests'. A kill that meets nobody is tried again."""
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
