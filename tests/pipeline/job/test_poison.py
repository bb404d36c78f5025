"""Real processes that die, of a row or at moments drawn from a seed: every other row is answered, nothing loops."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import faults
import poison_stages
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from cli_command import HANGING_SECONDS, wait_until
from fault_bench import Bench, digests
from in_process import answered_rows, invoke, job_config, run_and_read, run_in_process
from process_kills import kill_worker
from transformers import AutoTokenizer

from pipeline import job as jobs
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.run import stages

ROWS, SHARD_ROWS, POISON = 6, 2, 3


ray.cloudpickle.register_pickle_by_value(poison_stages)  # workers cannot import what lies beside the tests


@pytest.fixture
def job(checkpoint: Path, tmp_path: Path) -> JobConfig:
    """6 rows in three shards; row 3 is the only one of nine tokens, and has the word that kills."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [" ".join(["cheap"] * (1 + row % 3)) for row in range(ROWS)]
    prompts[POISON] = f"food {poison_stages.KILLER}"
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert [row for row in range(ROWS) if lengths[row] == poison_stages.DEADLY_TOKENS] == [POISON], lengths
    pq.write_table(pa.table({"id": [f"row-{row}" for row in range(ROWS)], "prompt": prompts}), tmp_path / "in.parquet")
    return job_config(
        tmp_path / "in.parquet",
        tmp_path / "out",
        checkpoint,
        input={"id": "id"},
        output={"token_ids": True},
        sampling={"temperature": 1.0, "seed": 3},
        actors={"count": 1, "max_batch": 2},
        shard_rows=SHARD_ROWS,
        attempts=1,
    )


@pytest.mark.parametrize(
    ("stage", "deadly"),
    [
        pytest.param("ShardGenerator", poison_stages.DeadlyGenerate, marks=pytest.mark.slow),
        ("prepare", poison_stages.deadly_prepare),
    ],
    ids=["generate", "prepare"],
)
def test_a_row_that_kills_its_process_is_found(
    own_ray: None, stage: str, deadly: Any, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"path": str(tmp_path / "undisturbed"), "token_ids": True}
    want = run_and_read({**job.model_dump(exclude_none=True), "output": elsewhere})
    monkeypatch.setattr(stages, stage, deadly)
    outcome = jobs.run(job)
    assert (outcome.totals.rows, outcome.totals.errors) == (ROWS, 1)
    rows = answered_rows(tmp_path / "out")
    row = rows.pop(POISON)
    assert (row["id"], row["finish_reason"], row["generated_text"]) == (want.pop(POISON)["id"], "error", None)
    assert row["error"] == "the process died 1 time while it worked on this row alone"
    assert rows == want and all(row["error"] is None for row in rows)
    assert list((tmp_path / "out" / "_job" / "quarantine").iterdir()) == []


@pytest.mark.slow
def test_no_actor_of_a_finished_job_stays_in_an_exit_handler(
    own_ray: None, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Ray that goes on, as a cluster does."""
    monkeypatch.setattr(stages, "ShardGenerator", poison_stages.StaysAtExit)
    jobs.run(job)
    process = int((Path(job.model.path).parent / poison_stages.STAYING).read_text())
    try:
        wait_until(lambda: not psutil.pid_exists(process))
    finally:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process).kill()


@pytest.mark.ray
@pytest.mark.slow
def test_an_actor_that_dies_while_it_loads_ends_the_job_in_one_line(
    ray_to_be_left: None, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Path(job.model.path).parent / poison_stages.LOADS
    loads.unlink(missing_ok=True)
    monkeypatch.setattr(stages, "ShardGenerator", poison_stages.DeadlyLoad)
    result = invoke(tmp_path, job)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("skipdecode: failed: ")
    assert "an actor died while it loaded the model, attempt 1 of 1" in last
    assert len(loads.read_text().splitlines()) == 1


QUICK = ("kill", "poison", "twice")  # the others: make test-slow


@pytest.fixture(scope="module")
def commands(s3: StorageConfig, tmp_path_factory: pytest.TempPathFactory) -> faults.Bench:
    """Of 800 rows, for the command in processes of its own."""
    assert s3.endpoint_url
    found = faults.Bench(tmp_path_factory.mktemp("faults"), repetitions=5, limit=HANGING_SECONDS, at_once=1, rows=800)
    found.bucket = s3.endpoint_url
    return found


@pytest.mark.ray
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


@pytest.mark.parametrize("stage", ["actor", pytest.param("prepare", marks=pytest.mark.slow)])
def test_every_row_is_answered_once_though_a_worker_is_killed(own_ray: None, bench: Bench, stage: str) -> None:
    job = bench.job()
    run_in_process(job)
    bench.undisturbed = digests(bench.output(job))
    for seed in (11, 5, 2):  # after 1, 2 and 6 of 12 parts; a kill that comes before or after the job does not count
        trial = kill_worker(bench, stage, seed)
        assert trial.passed, trial
        if trial.hit:
            return
    pytest.fail("no kill hit a worker")


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
