"""`skipdecode plan`: the sample, the prediction, and the command, without Ray but for the last two tests."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import poison_stages
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import InProcess, invoke, job_values, run_in_process, run_interrupted
from moved_clock import Clock

from actors.answers import Prompt
from actors.engine.model.loading import inspect
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import EngineStats
from actors.settings import EngineSettings
from pipeline.advise import timing
from pipeline.advise.estimate import estimate, longest, losses, predict, sample_places
from pipeline.advise.timing import TimedCall, time_speeds
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
                count * second / speed,
                count * second / 2,
                EngineStats(
                    generated_tokens=3 * count,
                    layer_steps=12 * count // speed,
                    full_layer_steps=12 * count,
                    prefill_seconds=1.0,
                    decode_seconds=2.0,
                ),
                ["text"],
            )
            for count in calls
        ]
        for name, speed in (("1x", 1), ("2x", 2))
    }
    found = predict(speeds, timed, rows=rows, longest=rows / 2, startup=startup, factor=1.5)
    assert list(found) == ["1x", "2x"]
    full, fast = found.values()
    assert full["seconds"] == pytest.approx(startup + 1.5 * second * rows / 2)
    assert full["busy_seconds"] == pytest.approx(1.5 * second * rows)
    assert full["generated_tokens"] == round(3 * rows)
    assert (fast["sampled"], fast["layer_ratio"]) == (sum(calls), 2)
    assert fast["timed_seconds"] == pytest.approx(second * sum(calls) / 2)
    assert fast["speedup_low"] < 2 < fast["speedup_high"] and full["speedup_low"] == full["speedup_high"] == 1
    assert fast["speedup"] == pytest.approx(2) and fast["ideal"] == pytest.approx(3 / (1 + 2 / 2))
    for one in (full, fast):
        assert one["low"] <= one["seconds"] <= one["high"]
        assert one["high"] - one["low"] > 0.1 * (one["seconds"] - startup)


def test_the_interval_holds_what_batches_differ_in() -> None:
    """Nine batches of 1 s and one of 11 s; calls at another speed are compared with those of the same rows."""
    fast, full = ScheduleSpec().overridden({"speedup": 2.0, "horizon": 4}).build(12), ScheduleSpec().build(12)
    own = [TimedCall(1, one, one, EngineStats(), ["text"]) for one in (11.0, *[1.0] * 9)]
    other = [TimedCall(1, 33.0, 11.0, EngineStats(), ["text"])]
    found = predict({"2x": fast, "1x": full}, {"2x": own, "1x": other}, rows=1, longest=1, startup=0)
    one = found["2x"]
    assert one["seconds"] == pytest.approx(2) and one["low"] < 1 and 3 < one["high"] < 4
    assert (one["speedup"], found["1x"]["seconds"]) == (pytest.approx(3), pytest.approx(6))
    assert predict({"1x": full}, {"1x": []}, rows=1, longest=1, startup=0) == {}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9))
def test_an_actor_that_is_free_takes_the_next_shard(rows: list[int], actors: int) -> None:
    found = longest(rows, actors)
    assert max(max(rows), sum(rows) / actors) <= found <= sum(rows) / actors + max(rows)


def test_an_actor_times_every_speed_in_turn(checkpoint: Path) -> None:
    """Calls at other speeds have the rows of a call at the job's speed; without time, the job's own speed has one."""
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
    prompts = [Prompt([7 + row, 8], "x", row) for row in range(40)]
    calls = time_speeds(prompts, settings, speeds, 16, 600.0, 1e6).calls
    for timed in calls.values():
        assert [call.rows for call in timed] == [16, 16]
        assert all(call.seconds > 0 and call.stats.generated_tokens >= len(call.texts) == call.rows for call in timed)
    assert [call.own_seconds for call in calls["1x"]] == [call.seconds for call in calls["2x"]]
    layers = [call.stats.layer_steps for timed in calls.values() for call in timed]
    assert sum(layers[:2]) < sum(layers[2:])
    hurried = time_speeds(prompts, settings, speeds, 16, 0.0, 1e6).calls
    assert [[call.rows for call in timed] for timed in hurried.values()] == [[8], []]


class TimedGenerator:
    """Takes the place of `Generator`. A batch takes a fixed time and a time for each row, divided by the speed-up."""

    clock = Clock()
    fixed = each = 0.0

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.schedule, self.engine = settings, settings.schedule, Mock()

    def at(self, schedule: Schedule) -> TimedGenerator:
        return TimedGenerator(replace(self.settings, schedule=schedule))

    def take_stats(self) -> EngineStats:
        return EngineStats()

    def seconds(self, rows: int) -> float:
        assert isinstance(self.schedule, Schedule)
        batches = math.ceil(rows / self.settings.max_batch)
        return (batches * self.fixed + rows * self.each) / (self.schedule.speedup or 1.0)

    def answer(self, rows: Sequence[Prompt]) -> list[Any]:
        self.clock.now += self.seconds(len(rows))
        return []


@pytest.mark.parametrize("adapter", [None, "adapter"])
@pytest.mark.parametrize("gain", [1, 2, 4, 10])
@pytest.mark.parametrize(("rows", "seconds"), [(60, 1.0), (300, 1.0), (1000, 0.02), (2000, 1.0), (200_000, 1.0)])
@pytest.mark.parametrize("own", [1.0, 2.0, 4.0])
def test_a_sample_takes_a_tenth_of_the_job_and_predicts_it(
    monkeypatch: pytest.MonkeyPatch, own: float, rows: int, seconds: float, gain: float, adapter: str | None
) -> None:
    """gain: seconds of a row alone ÷ seconds of a row in a full batch, which are `seconds` at 1x."""
    for place, one in (("actors.generator.Generator", TimedGenerator), ("pipeline.advise.timing.time", Clock())):
        monkeypatch.setattr(place, one)
    monkeypatch.setattr("pipeline.advise.timing.fetched", lambda settings: settings)
    monkeypatch.setattr(TimedGenerator, "clock", timing.time)
    each = seconds * (64 - gain) / 63
    monkeypatch.setattr(TimedGenerator, "each", each)
    monkeypatch.setattr(TimedGenerator, "fixed", gain * seconds - each)
    spec, began = ScheduleSpec(), timing.time.monotonic()
    speeds = {
        f"{speed:g}x": (spec if speed == 1 else spec.overridden({"speedup": speed, "horizon": 4})).build(12)
        for speed in dict.fromkeys([own, 1.5, 3.0, 1.0])
    }
    settings = EngineSettings("", speed_adapter=adapter)
    shard = min(256, math.ceil(rows / 4))
    given = [Prompt([1, 2], "x", row) for row in range(min(rows, 2048))]
    sample = time_speeds(given, settings, speeds, min(shard, 128), 120.0, rows)
    spent = timing.time.monotonic() - began
    one = TimedGenerator(replace(settings, schedule=speeds[f"{own:g}x"]))
    job, calls = rows / shard * one.seconds(shard), sample.calls[f"{own:g}x"]
    predicted = rows * sample.gain * sum(call.seconds for call in calls) / sum(call.rows for call in calls)
    least = max(timing.LEAST_SECONDS, one.seconds(1) + one.seconds(2))  # a small job cannot be sampled for less
    assert spent <= 1.02 * max(0.1 * job, least), f"{spent / job:.1%}"
    assert predicted == pytest.approx(job, rel=0.25)
    if rows >= 2000:  # at most about the time limit: the warm-up of a second model may exceed it
        assert sample.calls["1x"] and spent <= 125


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


@pytest.mark.parametrize("command", ["plan", "try"])
def test_more_row_errors_than_allowed_are_a_warning(
    values: dict[str, Any], in_process: None, tmp_path: Path, command: str
) -> None:
    options = ["--rows", "60"] if command == "try" else ["--seconds", "1"]
    for allowed, words in ((0.01, "1 of 60 sampled rows (1.7%) cannot be answered"), (0.02, "")):
        done = invoke(tmp_path, {**values, "max_error_rate": allowed}, *options, command=command)
        said = [line for line in done.stdout.splitlines() if "max_error_rate" in line]
        assert done.exit_code == 0 and len(said) == bool(words), done.output
        assert all(words in line and "Leave such rows out of the input, or raise" in line for line in said)


def test_a_trained_checkpoint_is_planned_at_its_speeds(
    values: dict[str, Any], trained: Path, in_process: None, tmp_path: Path
) -> None:
    model = {"path": str(trained), "dtype": "float32", "cache": str(tmp_path / "cache")}
    values |= {"model": model, "price_per_hour": 2}
    values["schedule"] = {"speedup": 2}
    write_losses(trained)
    done = invoke(tmp_path, values, "--seconds", "20", command="plan")
    assert done.exit_code == 0, done.output
    assert "2x *" in done.stdout and "1x" in done.stdout and "speed-up" in done.stdout and "ideal" in done.stdout
    assert "against 1x; loses 1.5 [0.5, 2.5] fidelity" in done.stdout
    done = invoke(tmp_path, values, "--seconds", "20", "--json", command="plan")
    found = json.loads(done.stdout)
    assert found["chosen"]["speed"] == "2x" and {line["speed"] for line in found["speeds"]} >= {"1x", "2x"}
    assert found["saves"]["money"] == pytest.approx(found["saves"]["device_hours"] * 2)
    costs = {**found, "saves": {"seconds": -3.0, "device_hours": -0.1, "money": -1.5}}
    print_estimate(wide_console(shown := io.StringIO()), costs)
    assert "2x costs 1.50 and 3.0 s against 1x" in shown.getvalue()
    interval, ratio = r"\d+\.\d [a-z]+ \[[\d.]+ [a-z]+, [\d.]+ [a-z]+\]", r"\d\.\d\dx \[[\d.]+, [\d.]+\]"
    assert re.search(f"  about {interval}  .*  about {ratio}  ", shown.getvalue())
    timed = {**found, "speeds": [{**line, "timed_seconds": 10.0} for line in found["speeds"]]}
    print_estimate(wide_console(long := io.StringIO()), timed)
    assert re.search(f"  {interval}  .*  {ratio}  ", long.getvalue()) and "  about " not in long.getvalue()


@pytest.fixture
def trained(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, said to be trained for every speed."""
    folder = tmp_path / "trained"
    shutil.copytree(checkpoint, folder)
    stored = json.loads((folder / "skipdecode.json").read_text())
    (folder / "skipdecode.json").write_text(json.dumps({**stored, "trained": {"depths": [1], "prompt": ["full"]}}))
    return folder


def write_losses(checkpoint: Path) -> Path:
    """Write what `adapt` records beside a checkpoint that it has trained."""
    score = {"value": 60.0, "loss": 1.5, "loss_high": 2.5, "low": 59.0, "high": 61.0, "loss_low": 0.5}
    line = {"nominal": 2.0, "prompt": "full", "scores": {"fidelity": score}}
    record = checkpoint.parent / "adapt.json"
    record.write_text(json.dumps({"done": {"after": {"result": {"lines": [line, {**line, "nominal": None}]}}}}))
    return record


def test_what_an_adaptation_recorded_is_found(values: dict[str, Any], trained: Path) -> None:
    record = write_losses(trained)
    config = JobConfig.model_validate({**values, "model": {"path": str(trained)}})
    loss = losses(config, "full")["2x"]
    assert (loss["metric"], loss["loss"], loss["low"], loss["high"]) == ("fidelity", 1.5, 0.5, 2.5)
    assert losses(config, "first") == {}
    record.write_text("{")
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
    assert 0 < found["chosen"]["sampled"] <= ROWS
    assert found["startup"]["load"] > 0 and not (tmp_path / "out").exists()


def test_the_rest_of_an_interrupted_job_is_planned(monkeypatch: pytest.MonkeyPatch, many: dict[str, Any]) -> None:
    config = JobConfig.model_validate(many)
    run_interrupted(monkeypatch, config)
    rest = estimate(config, seconds=5, backend=InProcess())
    assert 0 < rest["rows_left"] < ROWS == rest["rows"]
    result = run_in_process(config)
    assert result.totals.rows == ROWS and result.fresh_rows == rest["rows_left"]
