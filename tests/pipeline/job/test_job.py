"""Whole jobs: every row once, resume, overwrite and buckets in this process; actors, kills and signals on Ray."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import Command, SlowCommand, assert_released
from in_process import invoke, job_config, parts, run_in_process
from leaks import assert_listens_here_alone, assert_no_secret, listening, planted_secrets
from ray.data import DataContext
from safetensors.torch import load_file, save_file

from actors.answers import ANSWER_TYPES, Prompt
from actors.generator import Generator
from actors.settings import EngineSettings
from pipeline import job as jobs
from pipeline.config.job import ActorsConfig, JobConfig, StorageConfig
from pipeline.run import ray_session
from pipeline.run.ray_session import placement_problem
from pipeline.runtime.isolated import Died
from pipeline.storage.folder import open_folder

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet"]
ROWS = 90
ACTORS = {"count": 2, "threads": 1, "max_batch": 8}
TWO = {"cpu [0]", "cpu [1]"}
SAMPLED = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, 90 rows, one of them null and one too long for the context of 64."""
    folder = tmp_path_factory.mktemp("inputs")
    prompts: list[str | None] = [" ".join(WORDS[row % 7 : row % 7 + 1 + row % 4]) for row in range(ROWS)]
    prompts[17], prompts[50] = None, "alpha " * 200
    for number, (first, end) in enumerate(((0, 40), (40, 41), (41, ROWS))):
        table = pa.table(
            {
                "id": [f"row-{row}" for row in range(first, end)],
                "prompt": prompts[first:end],
                "topic": list(range(first, end)),
            }
        )
        pq.write_table(table, folder / f"in-{number}.parquet", row_group_size=25)
    return folder


def config(inputs: Path | str, into: Path | str, checkpoint: Path, **changes: Any) -> JobConfig:
    values: dict[str, Any] = {
        "input": {"id": "id"},
        "output": {"keep": ["topic"], "token_ids": True, "cumulative_logprob": True},
        "sampling": SAMPLED,
        "actors": ACTORS,
        "shard_rows": 10,
        "shared_prefix": False,
        "max_error_rate": 0.1,
    }
    return job_config(inputs, into, checkpoint, **{**values, **changes})


@pytest.fixture(scope="module")
def undisturbed(
    inputs: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, jobs.JobResult]:
    """Output and result of a job in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "out", run_in_process(config(inputs, folder / "out", checkpoint))


def test_every_row_is_answered_once_in_its_place(undisturbed: tuple[Path, jobs.JobResult]) -> None:
    output, outcome = undisturbed
    table = pq.read_table(output)  # a reader that knows nothing of the job's own files
    rows = sorted(table.to_pylist(), key=lambda row: row["topic"])
    assert [row["id"] for row in rows] == [f"row-{row}" for row in range(ROWS)]
    carried, optional = ["id", "topic"], ["token_ids", "cumulative_logprob"]
    assert table.column_names == [*carried, *ANSWER_TYPES, *optional]
    bad = {row["topic"]: row["error"] for row in rows if row["error"] is not None}
    assert set(bad) == {17, 50}
    assert bad[17] == "prompt is null"
    assert "leaves no room in a context of 64" in bad[50]
    for row in rows:
        if row["topic"] in bad:
            assert (row["finish_reason"], row["generated_text"], row["generated_tokens"]) == ("error", None, 0)
        else:
            assert row["generated_tokens"] == len(row["token_ids"]) > 0
    totals, summary = outcome.totals, json.loads((output / "_SUCCESS").read_text())
    assert (totals.rows, totals.errors, outcome.fresh_rows) == (ROWS, 2, ROWS)
    assert (summary["rows"], summary["planned_rows"], summary["nominal_speedup"]) == (ROWS, ROWS, 2)
    assert totals.generated_tokens == sum(row["generated_tokens"] for row in rows)
    assert totals.layer_steps < totals.full_layer_steps


def test_answers_are_those_of_the_bare_engine(
    undisturbed: tuple[Path, jobs.JobResult], inputs: Path, checkpoint: Path
) -> None:
    """Row by row, each alone: the pipeline adds nothing and loses nothing."""
    output, _ = undisturbed
    sampling = {key: value for key, value in SAMPLED.items() if key != "seed"}
    generator = Generator(EngineSettings(str(checkpoint), sampling=sampling, seed=5, dtype="float32", threads=1))
    compared = 0
    differ = []
    answered = {row["topic"]: row for row in pq.read_table(output).to_pylist()}
    for path in sorted(inputs.glob("*.parquet"))[:2]:
        for number, row in enumerate(pq.read_table(path).to_pylist()):
            if answered[row["topic"]]["error"] is None:
                ids = generator.tokenizer(row["prompt"])["input_ids"]
                alone = generator.answer([Prompt(ids, str(path), number)])
                compared += 1
                if alone[0].token_ids != answered[row["topic"]]["token_ids"]:
                    differ.append(row["topic"])
    # alone, sums are rounded otherwise than in a batch: in one run of a hundred or so a draw falls on an edge
    assert compared > 30 and len(differ) <= 1, differ


def process_settings() -> tuple[Any, ...]:
    """What a program that calls `run` may have set itself."""
    context = DataContext.get_current()
    names = (
        "enable_progress_bars",
        "print_on_execution_start",
        "execution_no_progress_timeout_s",
        "raise_original_map_exception",
    )
    loggers = [logging.getLogger(name) for name in ("", "ray", "ray.data", "transformers", "pipeline")]
    return (
        [getattr(context, name) for name in names],
        [(logger.name, logger.level, [handler.level for handler in logger.handlers]) for logger in loggers],
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    )


def test_two_actors_on_ray_write_the_same_parts_and_leave_the_callers_settings(
    own_ray: None, undisturbed: tuple[Path, jobs.JobResult], inputs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The actors ask for GPUs, which are pretended: each sees one."""
    output, alone = undisturbed
    actors = {**ACTORS, "gpus": 1, "cpus": 0.5}
    job = config(inputs, tmp_path / "out", checkpoint, actors=actors)
    before = process_settings()
    outcome = jobs.run(job)
    assert process_settings() == before
    assert parts(tmp_path / "out") == parts(output)
    assert outcome.fresh_rows == ROWS
    for name in ("rows", "errors", "generated_tokens", "layer_steps", "full_layer_steps"):
        assert getattr(outcome.totals, name) == getattr(alone.totals, name), name
    table = pq.read_table(tmp_path / "out" / "_job" / "stats.pq")
    assert set(table["attempt"].to_pylist()) == {1} and min(table["commit_seconds"].to_pylist()) > 0
    assert set(table["device"].to_pylist()) <= TWO  # one actor may have answered all before the other was ready
    assert jobs.run(job).fresh_rows == 0


def test_a_death_where_an_actor_would_run_does_not_reach_the_driver(own_ray: None) -> None:
    with pytest.raises(Died, match="WorkerCrashedError"):
        jobs.ray_backend(verbose=False).call_as_actors(ActorsConfig(threads=1), lambda: os._exit(1), [()])


def test_resume_answers_only_what_is_left(
    undisturbed: tuple[Path, jobs.JobResult], inputs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Records of parts without one are rebuilt, records without parts are run again, and the bytes are the same."""
    output, first = undisturbed
    copy = tmp_path / "out"
    subprocess.run(["cp", "-r", str(output), str(copy)], check=True)
    (copy / "_SUCCESS").unlink()
    for shard in (1, 4, 5):
        (copy / f"part-{shard:06d}.parquet").unlink()
    for shard in (1, 2):
        (copy / "_job" / "commits" / f"{shard:06d}.json").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in copy.glob("*.parquet")}
    again = run_in_process(config(inputs, copy, checkpoint))
    assert again.fresh_rows == sum(first.manifest.shards[shard].rows for shard in (1, 4, 5))
    assert parts(copy) == parts(output)
    assert {name: (copy / name).stat().st_mtime_ns for name in kept} == kept
    assert (again.totals.rows, again.totals.errors) == (ROWS, 2)
    assert again.totals.layer_steps == first.totals.layer_steps
    assert again.totals.full_layer_steps == first.totals.full_layer_steps
    rebuilt = pq.read_table(copy / "_job" / "stats.pq").to_pylist()[2]
    assert rebuilt["rebuilt"]
    assert sorted(path.name for path in copy.rglob("*.parquet")) == sorted(parts(copy)), "tables of the job's own"


@pytest.mark.slow
def test_actors_that_ask_for_half_a_gpu_see_their_own(
    own_ray: None, inputs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Two GPUs are pretended; the model runs on the CPU of each actor."""
    job = config(
        inputs,
        tmp_path,
        checkpoint,
        sampling={**SAMPLED, "max_new_tokens": 24},
        actors={"min": 3, "max": 3, "gpus": 0.5, "cpus": 0.5, "threads": 1, "max_batch": 1},
        shard_rows=4,  # small enough that every actor answers some
    )
    assert jobs.run(job).totals.rows == ROWS
    assert set(pq.read_table(tmp_path / "_job" / "stats.pq")["device"].to_pylist()) == TWO


def test_placement_is_checked_before_it_can_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: False)

    assert not placement_problem(ActorsConfig(count=2), [{"CPU": 2.0}])
    for actors in (ActorsConfig(count=3), ActorsConfig(count=1, threads=3), ActorsConfig(count=1, cpus=2.5)):
        problem = placement_problem(actors, [{"CPU": 2.0}])
        assert "do not fit on 2 CPUs: lower actors.count or actors.threads, or set actors.cpus" in problem
    problem = placement_problem(ActorsConfig(count=3, gpus=0.5, cpus=0.1), [{"CPU": 2.0, "GPU": 1.0}])
    assert problem.startswith("3 actors of 0.5 GPUs do not fit on 1 GPUs")
    assert not placement_problem(ActorsConfig(min=1, max=9, gpus=1), [{"CPU": 4.0, "GPU": 1.0}])
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"memory": 1.0}]
    problem = placement_problem(ActorsConfig(count=1, threads=8), nodes)
    assert problem.startswith("1 actors of 8 CPUs do not fit on 4 CPUs of any node: lower actors.")
    problem = placement_problem(ActorsConfig(count=1, gpus=2), nodes)
    assert problem.startswith("1 actors of 2 GPUs do not fit on 1 GPUs of any node")
    assert not placement_problem(ActorsConfig(count=2, threads=4, gpus=1), nodes)
    assert not placement_problem(ActorsConfig(count=5, threads=3), [{"CPU": 4.0}] * 4)  # four start: all rows come
    apart = [{"CPU": 8.0}, {"GPU": 2.0}]
    assert placement_problem(ActorsConfig(gpus=1), apart).startswith("1 actors of 1 CPUs do not fit on 0 CPUs of")
    assert not placement_problem(ActorsConfig(count=3, cpus=0.1), [{"CPU": 0.3}])


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_run_started_again_is_as_if_undisturbed(
    undisturbed: tuple[Path, jobs.JobResult], inputs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    whole, _ = undisturbed
    output = tmp_path / "out"
    job = config(inputs, output, checkpoint, actors={**ACTORS, "count": 1})
    first = SlowCommand(tmp_path, job)
    first.wait_for_parts(output, 2)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    early = {path.name: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert len(early) < len(parts(whole)), "killed too late to prove anything"
    second = Command(tmp_path, job, "--json")
    code, out, err = second.end()
    assert code == 0, err
    assert "resuming: " in err
    assert "ray" not in err.lower().replace("starting ray ...", "")  # as it says where that takes long
    summary = json.loads(out.splitlines()[-1])
    assert (summary["rows"], summary["errors"]) == (ROWS, 2)
    assert 0 < summary["fresh_rows"] < ROWS
    assert parts(output) == parts(whole)
    assert {name: (output / name).stat().st_mtime_ns for name in early} == early
    assert not list((output / "_job" / "tmp").iterdir())
    first.assert_nothing_left()
    second.assert_nothing_left()


@pytest.mark.ray
@pytest.mark.parametrize("grace", [60, pytest.param(0, marks=pytest.mark.slow)])
def test_sigterm_is_exit_4_and_what_is_in_flight_is_finished_or_dropped(
    inputs: Path, checkpoint: Path, tmp_path: Path, s3: StorageConfig, grace: float
) -> None:
    """The whole process group gets it, as from `timeout`, systemd and Slurm.

    The input is in a bucket. No process tells a secret or listens to other machines meanwhile.
    """
    output, whole = tmp_path / "out", tmp_path / "whole"
    source = open_folder(f"s3://bucket/sigterm-{grace}", s3)
    for path in inputs.glob("*.parquet"):
        source.replace(path.name, path.read_bytes())
    actors = {**ACTORS, "count": 1}
    job = config(source.url, output, checkpoint, grace_seconds=grace, actors=actors, storage=s3.model_dump())
    run_in_process(config(source.url, whole, checkpoint, storage=s3.model_dump()))
    ports: set[tuple[str, str]] = set()
    calls = itertools.count()

    def has_parts() -> bool:
        if next(calls) % 20 == 0:
            ports.update(listening(run.process.pid))
        return len(parts(output)) >= 2

    with planted_secrets() as ray_folder:
        run = SlowCommand(tmp_path, job)
        run.wait_until(has_parts, every=0.03)
        os.killpg(run.process.pid, signal.SIGTERM)
        early = len(parts(output))
        run.held.unlink()
        code, out, err = run.end()
        written = {str(path): path.read_bytes() for path in output.rglob("*") if path.is_file()}
        assert_no_secret({**written, "out": out.encode(), "err": err.encode()}, ray_folder)
    assert_listens_here_alone(ports)
    assert code == 4, err
    assert "the same command finishes the job" in err.splitlines()[-1]
    assert_released(output)
    assert not (output / "_SUCCESS").exists()
    assert len(parts(output)) < len(parts(whole))
    stopping = re.search(r"^stopping: up to 60 s for (\d) shards at work", err, re.MULTILINE)
    if grace == 0:
        assert stopping is None
    elif stopping is not None:  # else none was at work in that moment
        # a shard counts as at work until a little after its commit, so that some may be among the early parts
        assert len(parts(output)) >= max(early, int(stopping[1]))
        assert len(list((output / "_job" / "commits").iterdir())) == len(parts(output))
    run.assert_nothing_left()
    if grace:
        run_in_process(job)
        assert parts(output) == parts(whole)
        assert_released(output)


def test_missing_weights_fail_the_job_in_one_line(
    in_process: None, inputs: Path, checkpoint: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(checkpoint), str(broken)], check=True)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = invoke(tmp_path, config(inputs, tmp_path / "out", broken, attempts=1))
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    name = "model.layers.2.mlp.up_proj.weight"
    missing = f"{broken}: {name} does not fit config.json (missing): fetch the checkpoint again"
    assert last == f"skipdecode: {tmp_path}/job.yaml: {missing}"
    assert not (tmp_path / "out").exists()  # refused before anything is written
