"""`skipdecode plan`: costs, simulated batches against the engine's own, and the command, without Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from in_process import run_in_process
from typer.testing import CliRunner

from actors.answers import Prompt
from actors.engine.cache import cache_bytes_per_row
from actors.engine.gpu.pages import token_bytes
from actors.engine.schedules.schedule import ScheduleSpec
from actors.generator import Generator
from pipeline.backends.in_process import InProcess
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.estimate.costs import Costs, fit
from pipeline.estimate.measure import Answered, measure_actor
from pipeline.estimate.predict import Work
from pipeline.estimate.report import histogram, to_dict
from pipeline.estimate.rows import Rows, sample_places
from pipeline.estimate.run import estimate, load_in_a_run
from pipeline.estimate.scores import ScoredChunk, ScoreSample, predict_scores
from pipeline.estimate.simulate import EngineShape, SimulatedRow, simulate
from pipeline.estimate.speeds import losses
from pipeline.read.shards import Shard

WORDS = ["alpha", "bravo", "cheap", "pub", "food", "riverside"]
NO_COSTS = Costs((0.0,) * 4, (0.0,) * 5)


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """60 rows of one to six words; the fourth is null."""
    prompts = [" ".join(WORDS[: 1 + row % 6]) for row in range(60)]
    table = pa.table({"id": range(60), "prompt": [*prompts[:3], None, *prompts[4:]]})
    pq.write_table(table, tmp_path / "in.parquet")
    return {
        "input": {"path": str(tmp_path / "in.parquet"), "id": "id"},
        "output": {"path": str(tmp_path / "out")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 12, "temperature": 1.0, "seed": 5},
        "actors": {"threads": 1, "max_batch": 8},
        "max_error_rate": 1,
    }


def test_least_squares_finds_the_coefficients_and_none_below_zero() -> None:
    random = np.random.default_rng(1)
    terms = np.abs(random.normal(size=(80, 4))) * [1, 10, 1000, 1e6]
    true = np.array([0.5, 0.0, 2e-3, 1e-7])
    assert fit(terms, terms @ true) == pytest.approx(true, rel=1e-3, abs=1e-9)
    assert (fit(terms, -terms @ true) == 0).all()
    assert (fit(np.zeros((0, 4)), np.zeros(0)) == 0).all()


@given(*[st.floats(0.1, 60)] * 2, st.integers(1, 32), st.integers(1, 1000), st.integers(1, 64))
def test_models_load_slower_beside_the_workers_of_a_run(
    seconds: float, imports: float, actors: int, shards: int, cores: int
) -> None:
    found = load_in_a_run(seconds, imports, actors, shards, cores)
    assert seconds <= found <= (seconds + imports) * 1.0001
    if actors >= cores:
        assert found == pytest.approx(seconds + imports * min(cores, shards) / cores)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_every_prompt_is_in_one_bin(tokens: list[int]) -> None:
    bins = histogram(tokens)
    assert sum(entry["rows"] for entry in bins) == len(tokens)
    for entry in bins:
        assert entry["rows"] == sum(entry["from"] <= count <= entry["to"] for count in tokens)


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("speedup", [1.0, 2.0])
def test_simulated_batches_are_the_engines(checkpoint: Path, scheduler: str, speedup: float) -> None:
    """Given the answers' true lengths, the simulation counts the engine's batches, steps, layers and cache bytes."""
    generator = Generator(
        str(checkpoint),
        schedule={"speedup": speedup, "horizon": 6},
        unadapted=True,
        sampling={"max_new_tokens": 14, "temperature": 1.0},
        dtype="float32",
        threads=1,
        max_batch=5,
        scheduler=scheduler,
    )
    random = np.random.default_rng(3)
    prompts = [Prompt(random.integers(5, 50, size=1 + row % 17).tolist(), "x", row) for row in range(33)]
    answers = generator.answer(prompts)
    real = generator.take_stats()
    engine = generator.engine
    context = engine.decoder.context_length
    shape = EngineShape(engine.token_bytes, context, False, generator.cache_bytes, 5, scheduler, ())
    rows = [
        SimulatedRow(prompt.ids, generator.token_limit(prompt), answer.generated_tokens, answer.row)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    found = simulate(rows, generator.schedule, NO_COSTS, shape)
    assert len({answer.generated_tokens for answer in answers}) > 1
    assert (found.batches, found.row_steps, found.layer_steps, found.generated_tokens, found.cache_bytes) == (
        real.batches,
        real.decode_steps,
        real.layer_steps,
        real.generated_tokens,
        real.cache_bytes,
    )


def test_a_cache_of_8_bits_is_planned_in_fewer_batches() -> None:
    """Llama-3-8B's pages: 1.94 times the rows in the same bytes."""
    schedule = ScheduleSpec().build(32)
    rows = [SimulatedRow([5] * 60, 40, 40, number) for number in range(100)]
    batches = []
    for bits in (16, 8):
        size = token_bytes(8, 128, bits // 8)
        shape = EngineShape(size, 4096, False, 10 * cache_bytes_per_row(schedule, 60, 40, 4096), 64, "lock_step", ())
        batches.append(simulate(rows, schedule, NO_COSTS, shape).batches)
    assert batches == [10, 6]  # of 10 rows, and of 19


def test_a_prefix_in_pages_is_planned_once_a_batch() -> None:
    """96 of its 100 tokens fill pages: beside a row of 120 and 40 tokens come 22 of 24 and 40 in the bytes of 10."""
    schedule, prefix = ScheduleSpec().build(32), tuple([5] * 100)
    rows = [SimulatedRow([*prefix, *[6 + number] * 20], 40, 40, number) for number in range(100)]
    size, found = cache_bytes_per_row(schedule, 120, 40, 4096), []
    for shared in ((), prefix):
        shape = EngineShape(4096, 4096, True, 10 * size, 64, "lock_step", shared, share_prefixes=False)
        found.append(simulate(rows, schedule, NO_COSTS, shape))
    assert [one.batches for one in found] == [10, 5]
    assert found[0].row_steps == found[1].row_steps


def test_an_actor_notes_every_pass_and_step(checkpoint: Path) -> None:
    generator = {
        "checkpoint": str(checkpoint),
        "unadapted": True,
        "sampling": {"max_new_tokens": 6},
        "dtype": "float32",
        "threads": 1,
        "max_batch": 16,
    }
    schedule = Generator(**generator).schedule
    prompts = [Prompt([7 + row, 8], "x", row) for row in range(40)]
    sample = measure_actor(prompts, generator, [], {"1x": schedule}, 60.0)
    measured = sample.speeds["1x"]
    assert [len(chunk.rows) for chunk in measured.chunks] == [16, 16, 8]
    assert [line[1] for line in measured.passes] == [8, 16, 16, 8]  # the first tells costs apart
    answered = [one for chunk in measured.chunks for one in chunk.answered]
    steps = sum(one.tokens - 1 for one in [*answered[:8], *answered])
    assert sum(line[1] for line in measured.steps) == steps
    assert all(line[-1] > 0 for line in [*measured.passes, *measured.steps])


def test_rows_draw_answers_of_similar_prompts() -> None:
    known = {("x", row): Prompt([0] * (1 + row), "x", row) for row in range(200)}
    known["x", 3] = replace(known["x", 3], error="bad")
    answered = [Answered(tokens, 500, 2 * tokens) for tokens in range(1, 201)]
    rows = Rows(known, answered, 1, np.random.default_rng(0)).of(Shard(0, "x", 0, 200))
    assert len(rows) == 199
    assert all(abs(row.tokens - 2 * len(row.prompt_ids)) <= 34 for row in rows)


def test_the_sample_is_spread_over_the_shards() -> None:
    shards = [Shard(index, "x", 100 * index, 100) for index in range(100)]
    places = sample_places(shards, 320)
    assert sum(place.rows for place in places) == 320 and len(places) == 16
    assert places[-1].first_row > 9000
    assert sample_places(shards[:2], 320) == shards[:2]


def test_the_estimate_counts_rows_and_writes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    config = JobConfig.model_validate({**values, "price_per_hour": 3.0})
    before = sorted(tmp_path.rglob("*"))
    found = to_dict(estimate(config, backend=InProcess(), seconds=20))
    assert sorted(tmp_path.rglob("*")) == before
    assert (found["rows"], found["rows_left"], found["row_errors"]["errors"]) == (60, 60, 1)
    chosen = found["chosen"]
    assert chosen["low"] <= chosen["seconds"] <= chosen["high"]
    assert chosen["money"] == pytest.approx(3.0 * chosen["device_hours"])
    assert json.loads(json.dumps(found))["chosen"]["speed"] == "2x"
    run_in_process(config)
    table = pq.read_table(tmp_path / "out")
    tokens = sum(table["generated_tokens"].to_pylist())
    assert chosen["generated_tokens"] == pytest.approx(tokens, rel=0.35)
    assert chosen["prompt_tokens"] == sum(table["prompt_tokens"].to_pylist())
    summary = json.loads((tmp_path / "out" / "_job" / "summary.json").read_text())
    assert chosen["batches"] == summary["batches"]


def test_a_trained_checkpoint_is_planned_at_its_speeds(
    values: dict[str, Any], trained: Path, in_process: None, tmp_path: Path
) -> None:
    model = {"path": str(trained), "dtype": "float32", "cache": str(tmp_path / "cache")}
    values |= {"model": model, "price_per_hour": 2}
    values["schedule"] = {"agreement_rows": 0, "speedup": 2}
    values["budget"] = {"tokens": 1}
    (trained / "table.json").write_text(
        json.dumps(
            [
                {
                    "nominal": 2.0,
                    "prompt": "full",
                    "group": "speed",
                    "bleu_loss": 0.3,
                    "bleu_loss_low": -0.5,
                    "bleu_loss_high": 1.1,
                }
            ]
        )
    )
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(app, ["plan", str(job), "--seconds", "20"])
    assert done.exit_code == 0, done.output
    assert "2x *" in done.stdout and "1x" in done.stdout
    assert "against 1x; loses 0.3 [-0.5, 1.1] bleu" in done.stdout
    assert "budget: not enough, the job would stop: tokens" in done.stdout
    done = CliRunner().invoke(app, ["plan", str(job), "--seconds", "20", "--json"])
    found = json.loads(done.stdout)
    assert found["chosen"]["speed"] == "2x" and found["saves"]["money"] == pytest.approx(
        found["saves"]["device_hours"] * 2
    )
    assert {line["speed"] for line in found["speeds"]} >= {"1x", "2x"}
    (kept,) = (tmp_path / "cache" / "plans").iterdir()  # for the job's report
    assert json.loads(kept.read_text()).items() >= found.items()


@pytest.fixture
def trained(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, said to be trained for every speed."""
    import shutil

    folder = tmp_path / "trained"
    shutil.copytree(checkpoint, folder)
    stored = json.loads((folder / "skipdecode.json").read_text())
    (folder / "skipdecode.json").write_text(json.dumps({**stored, "trained": {"min_depth": 1, "prompt": ["full"]}}))
    return folder


def test_what_an_adaptation_recorded_is_found(values: dict[str, Any], trained: Path) -> None:
    score = {"value": 60.0, "loss": 1.5, "loss_high": 2.5}
    line = {"nominal": 2.0, "prompt": "full", "scores": {"fidelity": score}}
    record = {"done": {"after": {"result": {"lines": [line, {**line, "nominal": None}]}}}}
    (trained.parent / "adapt.json").write_text(json.dumps(record))
    config = JobConfig.model_validate({**values, "model": {"path": str(trained)}})
    assert str(losses(config, "full")["2x"]) == "loses 1.5 [2.5] fidelity"
    assert losses(config, "first") == {}
    (trained.parent / "adapt.json").write_text("{")
    assert losses(config, "full") == {}


def test_a_job_that_cannot_be_planned_is_one_line(values: dict[str, Any], in_process: None, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    values["input"]["template"] = "{{ missing }}"
    job.write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(app, ["plan", str(job)])
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1


def test_a_finished_job_has_nothing_left_and_that_is_no_error(
    values: dict[str, Any], in_process: None, tmp_path: Path
) -> None:
    run_in_process(JobConfig.model_validate(values))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    plan = ["plan", str(tmp_path / "job.yaml")]
    said, as_json = (CliRunner().invoke(app, [*plan, *options]) for options in ((), ("--json",)))
    assert (said.exit_code, as_json.exit_code) == (0, 0)
    assert said.stdout == f"{values['output']['path']}: nothing left to do: every row is answered\n"
    assert json.loads(as_json.stdout)["rows_left"] == 0


def test_a_job_that_scores_is_planned_by_its_tokens(values: dict[str, Any], in_process: None, tmp_path: Path) -> None:
    """Counted as the run counts them; its time lies between what its sampled batches say."""
    prompts = [" ".join(WORDS[: 1 + row % 6]) for row in range(60)]
    ways = [["pub", "food riverside"][: 1 + row % 2] for row in range(60)]
    table = pa.table({"id": range(60), "prompt": [*prompts[:3], None, *prompts[4:]], "ways": ways})
    pq.write_table(table, tmp_path / "scores.parquet")
    score = {name: value for name, value in values.items() if name not in ("sampling", "schedule")}
    score |= {"task": "score", "input": {"path": str(tmp_path / "scores.parquet"), "continuations": "ways"}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(score))
    done = CliRunner().invoke(app, ["plan", str(job), "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout.splitlines()[-1])
    assert [line["speed"] for line in planned["speeds"]] == ["1x"] and planned["row_errors"]["errors"] == 1
    chosen = planned["chosen"]
    assert chosen["low"] <= chosen["seconds"] <= chosen["high"] and chosen["decode_seconds"] == 0
    assert chosen["seconds"] > planned["startup"]["seconds"] and planned["sample"]["rows"] == 59
    shown = CliRunner().invoke(app, ["plan", str(job)])
    assert "scored tokens" in shown.stdout and "59 rows that an actor scored here" in shown.stdout
    totals = run_in_process(JobConfig.model_validate(score)).totals
    assert chosen["prompt_tokens"] == totals.prompt_tokens and chosen["generated_tokens"] == totals.generated_tokens


@given(st.lists(st.integers(20, 500), min_size=1, max_size=30), st.integers(1, 4), st.floats(1e-6, 1e-2))
def test_scores_take_the_time_of_their_tokens(lengths: list[int], actors: int, rate: float) -> None:
    """A shard of known rows, and one of rows that are taken to be like them; a beginning of 7 tokens in all of them."""
    known = {("a", row): Prompt([1] * length, "a", row, continuations=[[1, 2]]) for row, length in enumerate(lengths)}
    shards = [Shard(0, "a", 0, len(lengths)), Shard(1, "b", 0, len(lengths))]
    tokens = 7 + sum(length - 7 for length in set(lengths)) + 2 * len(lengths)  # equal prompts are computed once
    chunks = [ScoredChunk(5, 100, 100 * rate), ScoredChunk(5, 300, 300 * rate)]
    samples = [ScoreSample(0.0, chunks, 12)] * 2  # of twelve rows two have no scores
    found = predict_scores(samples, Work(shards, known, actors, 7.0, 0.0, crowd=1.5), prefix=7)
    assert found.busy_seconds == pytest.approx(3 * tokens * rate)
    assert found.seconds == pytest.approx(7 + (3 if actors == 1 else 1.5) * tokens * rate)
    assert found.generated_tokens == round(2 * len(lengths) * 2 * 10 / 12)
    slow = [ScoreSample(0.0, [*chunks, ScoredChunk(5, 100, 900 * rate)], 15)]
    assert (
        predict_scores(slow, Work(shards, known, 1, 0.0, 0.0), 7).high
        > 1.2 * predict_scores(slow, Work(shards, known, 1, 0.0, 0.0), 7).seconds
    )


def test_rows_of_which_none_can_be_scored_are_one_line(
    values: dict[str, Any], in_process: None, tmp_path: Path
) -> None:
    table = pa.table({"id": range(9), "prompt": ["cheap pub"] * 9, "ways": [["food"]] * 9})
    pq.write_table(table, tmp_path / "scores.parquet")
    score = {name: value for name, value in values.items() if name not in ("sampling", "schedule")}
    score |= {"task": "score", "input": {"path": str(tmp_path / "scores.parquet"), "continuations": "ways"}}
    score["actors"] = {"threads": 1, "cache_bytes": 1}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(score))
    done = CliRunner().invoke(app, ["plan", str(job)])
    assert done.exit_code == 2 and "no sampled row has scores" in done.stderr
