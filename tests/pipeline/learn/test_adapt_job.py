"""`skipdecode adapt` with real answers, training and evaluation, without Ray; and its choice of a speed, as laws."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.engine.model.loading import inspect
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import dump_yaml, validated
from pipeline.learn.adapt import choice
from pipeline.learn.adapt import task as task_module
from pipeline.learn.adapt.choice import (
    BreakEven,
    RowCost,
    announcement,
    choose,
    nearest,
    speed_accounts,
    working_actors,
)
from pipeline.learn.adapt.plan import plan_adaptation
from pipeline.learn.score.lines import Line, Score

ROWS = 40
PROMPTS: list[str | None] = [f"name[Zizzi], area[{row}]" for row in range(ROWS)]
TRAINED = {"training": {"max_steps": 2, "batch_size": 4, "threads": 1}, "runs": 1}


@pytest.fixture
def without_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights answer no better than chance, and would not be chosen."""
    monkeypatch.setattr("pipeline.learn.adapt.run.scores_of", lambda values: {})


def run_command(name: str, file: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The object that a command prints, and its messages."""
    result = CliRunner().invoke(app, [name, str(file), "--json", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def write_job(
    folder: Path, checkpoint: Path, prompts: list[str | None], adapt: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """Write `job.yaml` over these prompts, and return its values."""
    table = {"key": list(range(ROWS)), "q": prompts}
    pq.write_table(pa.table(table), folder / "in.parquet", row_group_size=8)
    values = {
        "input": {"path": str(folder / "in.parquet"), "id": "key", "template": "{{ q }}"},
        "output": {"path": str(folder / "out")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "actors": {"threads": 1, "max_batch": 8},
        "adapt": {"rows": ROWS, "held_out": 8, **adapt},
        **changes,
    }
    (folder / "job.yaml").write_text(dump_yaml(values))
    return values


@pytest.mark.parametrize("weights", ["adapter", "full"])
def test_from_a_job_to_a_faster_one(
    in_process: None,
    without_chance: None,
    tmp_path: Path,
    checkpoint: Path,
    weights: str,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all weights by a measured order, of which the written job says nothing: the checkpoint has it."""
    monkeypatch.setattr(task_module, "PROMPT_SHARE", 2.0)  # else the clock decides whether `prompt: first` is tried
    prompts = [*PROMPTS[:7], None, *PROMPTS[8:]]
    adapt = {**TRAINED, "speedups": [1, 2], "tolerance": 100.0, "weights": weights}
    schedule = {"keep_order": "measured"} if weights == "full" else {}
    changes = {"schedule": schedule, "sampling": {"max_new_tokens": 10}}
    values = write_job(tmp_path, checkpoint, prompts, adapt, **changes)
    found, _ = run_command("adapt", tmp_path / "job.yaml")
    assert [line["nominal"] for line in found["before"]] == [1, 2]
    # an adapter leaves the job's checkpoint at 1x; all weights make another one, at full depth too
    assert [line["nominal"] for line in found["after"]] == ([1, 2] if weights == "adapter" else [None, 1, 2])
    assert found["after"][0]["scores"]["agreement_exact"]["value"] == 100
    assert (found["chosen"]["nominal"], found["counts"]["errors"]) == (2, 1)
    assert sum(found["counts"][name] for name in ("train", "dev", "held_out", "errors", "empty")) == ROWS

    # the tokens trained on are those that the job's checkpoint gives at full depth: alone, it agrees with itself
    assert found["before"][0]["scores"]["agreement_exact"]["value"] == 100
    trained = tmp_path / "out-adapt" / ("speed-adapter" if weights == "adapter" else "checkpoint")
    record = json.loads((trained / "tune.json").read_text())
    assert (record["steps"], record["bf16"]) == (2, False)  # as model.dtype says
    order = json.loads((trained / "skipdecode.json").read_text())["keep_order"]
    measured = [json.loads(path.read_text()) for path in own_cache.glob("keep-orders/*.json")]
    assert [order] == ([record["keep_order"] for record in measured] if weights == "full" else ["paper"])
    model = yaml.safe_load(Path(found["job_file"]).read_text())["model"]
    named = {"path": str(checkpoint), "speed_adapter": str(trained)} if weights == "adapter" else {"path": str(trained)}
    assert model == {**values["model"], **named}
    assert run_command("adapt", tmp_path / "job.yaml")[0] == found  # nothing is done again

    summary, _ = run_command("run", found["job_file"], "--set", "max_error_rate=0.1")
    assert (summary["planned_rows"], summary["nominal_speedup"]) == (ROWS, 2)
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == list(range(ROWS))


def test_labels_of_one_token_gain_by_skipping_in_the_prompt(
    in_process: None, without_chance: None, tmp_path: Path, checkpoint: Path
) -> None:
    """Without a decode step the layers of the prompt are the only ones to skip."""
    adapt = {**TRAINED, "speedups": [3], "tolerance": 200.0}
    write_job(tmp_path, checkpoint, PROMPTS, adapt, choices=["a", "b"])
    found, _ = run_command("adapt", tmp_path / "job.yaml")
    lines = [(line["name"], line["nominal"], line["prompt"]) for line in found["after"]]
    names = ["1x", "3x", "3x prompt=first", "3x uniform"]
    assert lines == list(zip(names, (1, 3, 3, 3), ("full", "full", "first", "first"), strict=True))
    folder = tmp_path / "out-adapt"
    tuned = json.loads((folder / "speed-adapter" / "tune.json").read_text())
    assert tuned["schedules"] == names[1:] and set(tuned["dev_loss"]) == {
        "eval_loss",
        *map("eval_loss_{}".format, names[1:]),
    }
    written = yaml.safe_load(Path(found["job_file"]).read_text())["schedule"]
    assert written.get("prompt", "full") == found["chosen"]["prompt"]
    assert ("decay" in written) == found["chosen"]["uniform"]
    for name in ("before", "after"):
        answers = pq.read_table(folder / f"{name}.parquet")
        assert answers.column_names == ["prompt", *names] and answers.num_rows == found["counts"]["held_out"]
        assert answers["prompt"][0].as_py().count("name[Zizzi]") == 1 and answers["1x"][0].as_py() in ("a", "b")


@pytest.mark.parametrize(("prompt", "answer", "n"), [(2.0, 0.0, 1), (0.0, 2.0, 1), (1.0, 3.0, 4)])
def test_the_estimate_says_from_how_many_rows_an_adaptation_pays(
    tmp_path: Path, checkpoint: Path, prompt: float, answer: float, n: int
) -> None:
    """Seconds of a row's prompt and of one answer, of which a job with n samples has n. The head skips nothing."""
    sampling = {"max_new_tokens": 10, **({"temperature": 1.0, "n": n} if n > 1 else {})}
    adapt = {"speedups": [1, 2, 4], "prompt": "full"}
    values = write_job(tmp_path, checkpoint, PROMPTS, adapt, sampling=sampling)
    task, _ = plan_adaptation(validated(JobConfig, values, "job.yaml"), "job.yaml")
    row, parameters = RowCost(20.0, 6.0, prompt, answer), inspect(checkpoint).config.vocab_size * 64 * 10
    found = speed_accounts(task, row, 100.0, parameters)
    assert list(found) == [2, 4]
    for account in found.values():
        assert (account.rows, account.cost, account.full) == (ROWS, 100.0, prompt + n * answer)
        assert prompt + 0.1 * n * answer <= account.fast <= account.full
        assert (account.at_rows is None) == (answer == 0)
    assert found[4].fast <= found[2].fast
    line = announcement(task, row, {"answers"})
    pays = [line.partition("; pays ")[2]] if answer == 0 else re.findall(r"from [\d,]+ rows on at [24]x", line)
    assert len(pays) == (1 if answer == 0 else 2) and line.endswith(f"; this job has {ROWS}")
    assert answer or pays == [f"never at 2x, never at 4x; this job has {ROWS}"]
    assert "GPU" not in line and "by stage: tune " in line


@pytest.mark.parametrize("weights", ["adapter", "full"])
def test_the_estimate_names_the_memory_of_a_gpu(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**36))
    values = write_job(tmp_path, checkpoint, PROMPTS, {"weights": weights})
    task, _ = plan_adaptation(validated(JobConfig, values, "job.yaml"), "job.yaml")
    row = RowCost(20.0, 6.0, 1.0, 1.0)
    assert re.search(r"; the training needs about \d+ MiB of the GPU's 64.0 GiB; pays ", announcement(task, row, set()))
    assert "GPU" not in announcement(task, row, {"answers", "tune"})


METRIC = "agreement_exact"
seconds = st.floats(1e-6, 1e4)


@st.composite
def lines(draw: st.DrawFn) -> list[Line]:
    """The job's own checkpoint, then the tuned one at 1x and at one to six speed-ups."""
    nominals: list[float | None] = [None, 1.0, *draw(st.lists(st.floats(1.01, 9), min_size=1, max_size=6, unique=True))]
    found = []
    for nominal in nominals:
        loss = draw(st.floats(-5, 50))
        quality = Score(100 - loss, loss, loss + draw(st.sampled_from([0.0, 1.0, 7.5])))
        found.append(
            Line(str(nominal), nominal, "full", nominal, draw(st.sampled_from([0.1, 0.2, 0.3])), {METRIC: quality})
        )
    return found


@given(lines(), st.floats(0.1, 60))
def test_the_choice_is_the_fastest_of_those_within_the_tolerance(measured: list[Line], tolerance: float) -> None:
    within = {
        line.nominal: line
        for line in measured
        if (line.nominal or 1) > 1 and line.scores[METRIC].loss_high <= tolerance
    }
    chosen = choose(METRIC, tolerance, measured, {})
    if chosen is None:
        assert not within
        return
    assert within[chosen.nominal] == chosen
    for other in within.values():
        assert chosen.seconds < other.seconds or (
            chosen.seconds == other.seconds and (chosen.layer_ratio or 1) >= (other.layer_ratio or 1)
        )


@given(lines())
def test_the_nearest_tolerance_admits_a_speed_and_a_smaller_one_none(measured: list[Line]) -> None:
    least = nearest(METRIC, measured, {}).scores[METRIC].loss_high
    assert choose(METRIC, least, measured, {}) is not None
    assert choose(METRIC, least - 1e-6, measured, {}) is None


def test_a_line_that_is_no_better_than_chance_is_never_chosen() -> None:
    line = Line("2x", 2.0, "full", 2.0, 0.1, {METRIC: Score(88.0, 12.0, 14.0)})
    better = Line("3x", 3.0, "full", 3.0, 0.2, {METRIC: Score(88.1, 11.9, 15.0)})
    chance = {METRIC: Score(88.0, 12.0, 14.0)}
    assert choose(METRIC, 20, [line], chance) is None
    assert choose(METRIC, 20, [line, better], chance) is nearest(METRIC, [line, better], chance) is better


@given(seconds, seconds, seconds, st.integers(1, 10**7), st.floats(1, 64))
def test_from_the_break_even_on_time_is_saved_and_before_it_is_not(
    cost: float, full: float, fast: float, rows: int, actors: float
) -> None:
    account = BreakEven(cost, full, fast, rows, actors)
    if fast >= full:
        assert account.at_rows is None and account.saved <= 0
        return
    assert account.at_rows is not None
    slack = 1e-9 * (cost + rows * full)
    assert account.saved >= -slack if rows >= account.at_rows else account.saved <= slack
    at = account.at_rows
    if at < 1e12:
        assert BreakEven(cost, full, fast, at, actors).saved >= -1e-9 * (cost + at * full)
        assert BreakEven(cost, full, fast, at - 1, actors).saved <= 1e-9 * (cost + at * full)


@pytest.mark.parametrize(
    ("fast", "rows", "actors", "said"),
    [
        (0.1, 10_000, 1, "1,000 rows; this job has 10,000 rows: 33.3 min become 18.3 min"),
        (0.1, 999, 1, "1,000 rows; this job has 999 rows, so for this job alone adaptation does not pay"),
        (0.1, 10_000, 4, "4,000 rows; this job has 10,000 rows: 8.3 min become 5.8 min"),  # a row saves a quarter of it
        (0.2, 10**9, 1, "never: 3x saves no time"),
    ],
)
def test_the_sentences_of_the_break_even(fast: float, rows: int, actors: int, said: str) -> None:
    account = BreakEven(100, 0.2, fast, rows, actors)
    text = account.sentences("3x")
    assert text[1].startswith(f"break-even: {said}")
    assert ("saved" in text[1]) == (rows >= (account.at_rows or math.inf))
    assert text[2].startswith(f"(assumed: {actors} actor") and "its own" in text[2]


@pytest.mark.parametrize(
    ("actors", "gpus", "threads", "cores", "devices", "at_once"),
    [
        (4, 0, 2, 8, 0, 4),
        (4, 0, 2, 4, 0, 2),
        (4, 0, 8, 4, 0, 1),
        (4, 0, 2, None, None, 4),
        (4, 1, 1, 2, 4, 4),
        (4, 0.5, 1, 2, 4, 2),  # two take turns on each GPU
        (8, 2, 1, 2, 4, 2),
        (8, 0.5, 1, None, None, 4),
        (1, 0.25, 1, 2, 1, 1),
    ],
)
def test_actors_count_where_they_have_hardware_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    actors: int,
    gpus: float,
    threads: int,
    cores: int | None,
    devices: int | None,
    at_once: float,
) -> None:
    monkeypatch.setattr(choice, "on_cluster", lambda: cores is None)
    monkeypatch.setattr(choice, "process_cpus", lambda: cores or 1)
    monkeypatch.setattr(choice.torch.cuda, "device_count", lambda: devices or 0)
    values = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "m"}}
    config = JobConfig.model_validate({**values, "actors": {"count": actors, "gpus": float(gpus)}})
    assert working_actors(config, threads) == at_once


@given(lines())
def test_measurements_survive_the_record(measured: list[Line]) -> None:
    for line in measured:
        assert Line.of(json.loads(json.dumps(asdict(line)))) == line
