"""`skipdecode plan`: the sample, the prediction, and the command, without Ray but for the last two tests."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import poison_stages
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import InProcess, invoke, job_values, run_in_process, run_interrupted

from actors.answers import Prompt
from actors.engine.model.loading import inspect
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import EngineStats
from actors.settings import EngineSettings
from pipeline.advise.estimate import TimedCall, estimate, longest, losses, predict, sample_places, time_speeds
from pipeline.config.job import JobConfig
from pipeline.input.shards import Shard
from pipeline.report.estimate_table import print_estimate
from pipeline.run.ray_data import RayData
from pipeline.runtime.wide_console import wide_console

WORDS = ["alpha", "bravo", "cheap", "pub", "food", "riverside"]


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """60 rows of one to six words; the fourth is null."""
    prompts = [" ".join(WORDS[: 1 + row % 6]) for row in range(60)]
    table = pa.table({"id": range(60), "prompt": [*prompts[:3], None, *prompts[4:]]})
    pq.write_table(table, tmp_path / "in.parquet")
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    own: dict[str, Any] = {"input": {"id": "id"}, "sampling": sampling, "actors": {"max_batch": 8}}
    return job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **own)


@given(st.floats(1e-4, 10), st.lists(st.integers(1, 400), min_size=1, max_size=8), st.floats(0, 60), st.floats(1, 1e6))
def test_a_job_takes_its_rows_times_the_seconds_of_a_sampled_row(
    second: float, calls: list[int], startup: float, rows: float
) -> None:
    """Seconds at half the layers are a half; the prefill of 1x is a third of its time and is not skipped."""
    spec = ScheduleSpec()
    speeds = {"2x": spec.overridden({"speedup": 2.0, "horizon": 4}).build(12), "1x": spec.build(12)}
    timed = {
        name: [
            TimedCall(
                count,
                7 * count,
                count * second / speed,
                EngineStats(
                    generated_tokens=3 * count,
                    layer_steps=12 * count // speed,
                    full_layer_steps=12 * count,
                    prefill_seconds=1.0,
                    decode_seconds=2.0,
                    cache_bytes=count,
                ),
                ["text"],
            )
            for count in calls
        ]
        for name, speed in (("1x", 1), ("2x", 2))
    }
    found = predict(speeds, timed, rows=rows, longest=rows / 2, startup=startup, crowd=1.5)
    assert list(found) == ["1x", "2x"]
    full, fast = found.values()
    assert full["seconds"] == pytest.approx(startup + 1.5 * second * rows / 2)
    assert full["busy_seconds"] == pytest.approx(1.5 * second * rows)
    assert (full["prompt_tokens"], full["generated_tokens"]) == (round(7 * rows), round(3 * rows))
    assert (fast["cache_bytes"], fast["sampled"], fast["layer_ratio"]) == (max(calls), sum(calls), 2)
    assert fast["timed_seconds"] == pytest.approx(second * sum(calls) / 2)
    assert fast["speedup_low"] < 2 < fast["speedup_high"] and full["speedup_low"] == full["speedup_high"] == 1
    assert fast["speedup"] == pytest.approx(2) and fast["ideal"] == pytest.approx(3 / (1 + 2 / 2))
    for one in (full, fast):
        assert one["low"] <= one["seconds"] <= one["high"]
        assert one["high"] - one["low"] > 0.1 * (one["seconds"] - startup)


def test_the_interval_holds_what_batches_differ_in() -> None:
    """Nine batches of 1 s and one of 11 s: the mean of ten drawn ones lies between 1 s and 5 s, nine times of ten."""
    calls = {"1x": [TimedCall(1, 1, 11.0 if number == 0 else 1.0, EngineStats(), ["text"]) for number in range(10)]}
    found = predict({"1x": ScheduleSpec().build(12)}, calls, rows=1, longest=1, startup=0)["1x"]
    assert found["seconds"] == pytest.approx(2) and found["low"] < 1.1 and 3.5 < found["high"] < 6
    assert predict({"1x": ScheduleSpec().build(12)}, {"1x": []}, rows=1, longest=1, startup=0) == {}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9))
def test_an_actor_that_is_free_takes_the_next_shard(rows: list[int], actors: int) -> None:
    found = longest(rows, actors)
    assert max(max(rows), sum(rows) / actors) <= found <= sum(rows) / actors + max(rows)


def test_an_actor_times_every_speed_in_turn(checkpoint: Path) -> None:
    """Calls of at most 16 rows; without time 1x and the job's speed answer one small call, others none."""
    settings = EngineSettings(
        str(checkpoint),
        unadapted=True,
        sampling={"max_new_tokens": 6},
        dtype="float32",
        threads=1,
        max_batch=16,
    )
    inspected = inspect(checkpoint)
    speeds = {"2x": inspected.schedule({"speedup": 2.0, "horizon": 3}), "1x": inspected.schedule({"speedup": 1.0})}
    others = {"1.5x": inspected.schedule({"speedup": 1.5, "horizon": 3})}
    prompts = [Prompt([7 + row, 8], "x", row) for row in range(40)]
    _, further, calls = time_speeds(prompts, settings, speeds, "2x", 16, 600.0)
    assert further == []  # one model serves all speeds
    for timed in calls.values():
        assert [call.rows for call in timed] == [14, 13, 13]
        assert all(call.seconds > 0 and call.prompt_tokens == 2 * call.rows for call in timed)
        assert all(call.stats.generated_tokens >= len(call.texts) == call.rows for call in timed)
    layers = [call.stats.layer_steps for timed in calls.values() for call in timed]
    assert sum(layers[:3]) < sum(layers[3:])
    *_, hurried = time_speeds(prompts, settings, speeds | others, "2x", 16, 0.0)
    assert [[call.rows for call in timed] for timed in hurried.values()] == [[8], [8], []]


def test_the_sample_is_spread_over_the_shards() -> None:
    shards = [Shard(index, "x", 100 * index, 100) for index in range(100)]
    places = sample_places(shards, 320)
    assert sum(place.rows for place in places) == 320 and len(places) == 16
    assert places[-1].first_row > 9000
    assert sample_places(shards[:2], 320) == shards[:2]


def test_the_estimate_counts_rows_and_writes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    config = JobConfig.model_validate({**values, "price_per_hour": 3.0})
    before = sorted(tmp_path.rglob("*"))
    found = estimate(config, backend=InProcess(), seconds=20)
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
    assert chosen["prompt_tokens"] == pytest.approx(sum(table["prompt_tokens"].to_pylist()), rel=0.1)


def test_a_trained_checkpoint_is_planned_at_its_speeds(
    values: dict[str, Any], trained: Path, in_process: None, tmp_path: Path
) -> None:
    model = {"path": str(trained), "dtype": "float32", "cache": str(tmp_path / "cache")}
    values |= {"model": model, "price_per_hour": 2}
    values["schedule"] = {"speedup": 2}
    loss = {"bleu_loss": 0.3, "bleu_loss_low": -0.5, "bleu_loss_high": 1.1}
    (trained / "table.json").write_text(json.dumps([{"nominal": 2.0, "prompt": "full", **loss}]))
    done = invoke(tmp_path, values, "--seconds", "20", command="plan")
    assert done.exit_code == 0, done.output
    assert "2x *" in done.stdout and "1x" in done.stdout and "speed-up" in done.stdout and "ideal" in done.stdout
    assert "against 1x; loses 0.3 [-0.5, 1.1] bleu" in done.stdout
    done = invoke(tmp_path, values, "--seconds", "20", "--json", command="plan")
    found = json.loads(done.stdout)
    costs = {**found, "saves": {"seconds": -3.0, "device_hours": -0.1, "money": -1.5}}
    print_estimate(wide_console(shown := io.StringIO()), costs)
    assert "2x costs 1.50 and 3.0 s against 1x" in shown.getvalue()
    assert re.search(r"  about \d\.\d\dx \[[\d.]+, [\d.]+\]  ", shown.getvalue())
    timed = {**found, "speeds": [{**line, "timed_seconds": 10.0} for line in found["speeds"]]}
    timed["chosen"] = next(line for line in timed["speeds"] if line["speed"] == "2x")
    print_estimate(wide_console(long := io.StringIO()), timed)
    assert re.search(r"  \d\.\d\dx \[[\d.]+, [\d.]+\]  ", long.getvalue()) and "  about " not in long.getvalue()
    assert "90% interval" in shown.getvalue() and re.search(r" \[[\d.]+ [a-z]+, ", shown.getvalue())
    sample = {**found["sample"], "rows": 2, "further_loads": 3, "further_load_seconds": 61.0}
    few = {**found, "sample": sample, "speeds": [{**line, "sampled": 2} for line in found["speeds"]]}
    few["chosen"] = few["speeds"][0]
    print_estimate(wide_console(shown := io.StringIO()), few)
    assert "the sample needed 3 further models, whose loading together took 61.0 s" in shown.getvalue()
    assert "interval" not in shown.getvalue() and not re.search(r" \[[\d.]+ [a-z]+, ", shown.getvalue())
    assert found["chosen"]["speed"] == "2x" and found["saves"]["money"] == pytest.approx(
        found["saves"]["device_hours"] * 2
    )
    assert {line["speed"] for line in found["speeds"]} >= {"1x", "2x"}


@pytest.fixture
def trained(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, said to be trained for every speed."""
    folder = tmp_path / "trained"
    shutil.copytree(checkpoint, folder)
    stored = json.loads((folder / "skipdecode.json").read_text())
    (folder / "skipdecode.json").write_text(json.dumps({**stored, "trained": {"depths": [1], "prompt": ["full"]}}))
    return folder


def test_what_an_adaptation_recorded_is_found(values: dict[str, Any], trained: Path) -> None:
    score = {"value": 60.0, "loss": 1.5, "loss_high": 2.5}
    line = {"nominal": 2.0, "prompt": "full", "scores": {"fidelity": score}}
    record = {"done": {"after": {"result": {"lines": [line, {**line, "nominal": None}]}}}}
    (trained.parent / "adapt.json").write_text(json.dumps(record))
    config = JobConfig.model_validate({**values, "model": {"path": str(trained)}})
    loss = losses(config, "full")["2x"]
    assert (loss["metric"], loss["loss"], loss["low"], loss["high"]) == ("fidelity", 1.5, None, 2.5)
    assert losses(config, "first") == {}
    (trained.parent / "adapt.json").write_text("{")
    assert losses(config, "full") == {}


def test_a_finished_job_has_nothing_left_and_that_is_no_error(
    values: dict[str, Any], in_process: None, tmp_path: Path
) -> None:
    run_in_process(JobConfig.model_validate(values))
    said, as_json = (invoke(tmp_path, values, *options, command="plan") for options in ((), ("--json",)))
    assert (said.exit_code, as_json.exit_code) == (0, 0)
    assert said.stdout == f"{values['output']['path']}: nothing left to do: the output has every row\n"
    assert json.loads(as_json.stdout)["rows_left"] == 0


class IsolatedPlanning(InProcess):
    """Plans as `skipdecode plan` does."""

    call_isolated = RayData.call_isolated  # type: ignore[assignment]


def test_a_row_that_kills_its_process_costs_its_place_in_the_sample(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.advise.estimate.read_prompts", poison_stages.deadly_read_prompts)
    config = JobConfig.model_validate({**values, "shard_rows": 15})
    found = estimate(config, seconds=5, backend=IsolatedPlanning())
    assert found["row_errors"]["sampled"] == 45 and found["rows"] == 60
    assert "15 sampled rows are left out: the process that prepared them died (killed by SIGKILL)" in caplog.text


ROWS = 240


@pytest.fixture
def many(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"prompt": [f"cheap pub {row}" for row in range(ROWS)]}), tmp_path / "in.parquet")
    own: dict[str, Any] = {"schedule": {"speedup": 1}, "sampling": {"max_new_tokens": 4, "ignore_eos": True}}
    own |= {"actors": {"count": 2, "max_batch": 8}, "shard_rows": 2}
    return job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **own)


@pytest.mark.slow
def test_actors_measure_at_the_same_time(own_ray: None, many: dict[str, Any], tmp_path: Path) -> None:
    found = estimate(JobConfig.model_validate(many), seconds=5)
    assert found["chosen"]["generated_tokens"] == 4 * ROWS
    assert 0 < found["sample"]["rows"] <= 2 * 64
    assert found["startup"]["load"] > 0 and not (tmp_path / "out").exists()


def test_the_rest_of_an_interrupted_job_is_planned(monkeypatch: pytest.MonkeyPatch, many: dict[str, Any]) -> None:
    config = JobConfig.model_validate(many)
    run_interrupted(monkeypatch, config)
    rest = estimate(config, seconds=5, backend=InProcess())
    assert 0 < rest["rows_left"] < ROWS == rest["rows"]
    result = run_in_process(config)
    assert result.totals.rows == ROWS and result.fresh_rows == rest["rows_left"]
