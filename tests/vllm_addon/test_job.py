"""A job with `model.engine: vllm`: killed and resumed, every row once, with the builtin engine's answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import vllm_cases as cases
import yaml
from in_process import answered_rows, run_and_read, run_in_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.settings import EngineSettings
from actors.vllm.engine import VllmEngine
from pipeline.advise.timing import time_speeds
from pipeline.answer.coordinator import Coordinator
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.learn.adapt import run as adaptation
from pipeline.learn.adapt.pairs import read_pairs
from pipeline.learn.adapt.plan import plan_adaptation
from pipeline.learn.adapt.task import HELD_OUT, TRAIN
from pipeline.learn.score.run import score
from pipeline.learn.score.timing import timed_in_vllm
from pipeline.learn.speeds import UNIFORM, variants
from pipeline.plan.batching import with_engine

ROOT = Path(__file__).parents[2]
ROWS, SHARD_ROWS = 48, 4
LABELS = ["French food", "French", "cheap", "centre"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny model, and prompts of which one is empty and one too long; some rows have their own sampling."""
    folder = tmp_path_factory.mktemp("job")
    model = cases.text_checkpoint(folder / "model")
    names = ["Alimentum", "The Eagle", "Zizzi", "Blue Spice"]
    prompts = [f"name[{names[row % 4]}], area[{row}]" for row in range(ROWS)]
    prompts[5], prompts[17] = "", "long " * 400
    own = [{"max_new_tokens": 4} if row % 7 == 0 else None for row in range(ROWS)]
    table = pa.table({"id": [f"r{row}" for row in range(ROWS)], "prompt": prompts, "sampling": own})
    pq.write_table(table, folder / "prompts.parquet")
    return {"model": str(model), "data": str(folder / "prompts.parquet")}


def job(folder: Path, inputs: dict[str, Any], engine: str, speedup: float, **changes: Any) -> dict[str, Any]:
    """A job file's values; its output is in a folder of its own."""
    model = {"path": inputs["model"], "dtype": "float32", "engine": engine}
    if engine == "vllm":
        model["vllm"] = {"block_size": cases.BLOCK, "max_model_len": 192, "enforce_eager": True}
    return {
        "input": {"path": inputs["data"], "id": "id", "sampling": "sampling"},
        "output": {"path": str(folder / f"{engine} {speedup}")},
        "model": model,
        "schedule": {"speedup": speedup, "horizon": 8, "unadapted": True},
        "sampling": {"max_new_tokens": 24, "stop": ["."]},
        "actors": {"count": 1, "threads": 1, "max_batch": 4, "cache_bytes": 2**27},
        "shard_rows": SHARD_ROWS,
        "max_error_rate": 0.1,
        "grace_seconds": 0,
        **changes,
    }


def start(file: Path) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(file.with_suffix(".log"), "a") as log:
        command = [sys.executable, "-m", "pipeline", "run", str(file)]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, text=True, start_new_session=True)


def shards(output: str) -> list[dict[str, Any]]:
    """What the statistics count, a shard a row, without times and places."""
    counts = ("rows", "errors", "prompt_tokens", "generated_tokens", "decode_steps", "layer_steps", "mean_depth")
    table = pq.read_table(Path(output) / "_job" / "stats.pq")
    return table.select([name for name in counts if name in table.column_names]).to_pylist()


@pytest.mark.timeout(3600)
def test_a_killed_job_goes_on_and_loses_no_row(inputs: dict[str, Any], tmp_path: Path) -> None:
    """SIGKILL hits the driver and every process that it has started, after three parts."""
    values, library = job(tmp_path, inputs, "vllm", 2), job(tmp_path, inputs, "builtin", 2)
    file, output = tmp_path / "job.yaml", Path(values["output"]["path"])
    file.write_text(yaml.safe_dump(values))
    wanted = run_and_read(library)
    process = start(file)
    until = time.monotonic() + 900
    while len(parts := sorted(output.glob("part-*.parquet"))) < 3:
        assert process.poll() is None and time.monotonic() < until, file.with_suffix(".log").read_text()
        time.sleep(0.02)
    for victim in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        victim.send_signal(signal.SIGKILL)
    process.wait()
    before = {part.name: part.read_bytes() for part in parts}
    assert len(before) < ROWS // SHARD_ROWS
    assert start(file).wait(900) == 0, file.with_suffix(".log").read_text()
    assert before.items() <= {part.name: part.read_bytes() for part in output.iterdir() if part.is_file()}.items()
    found = answered_rows(output)
    assert [row["id"] for row in found] == [f"r{row}" for row in range(ROWS)]
    assert [row["id"] for row in found if row["error"] is not None] == ["r5", "r17"]
    assert found == wanted
    assert shards(str(output)) == shards(library["output"]["path"])


def test_rows_of_the_next_shards_take_the_slots_of_rows_that_end(
    inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are as large as the batch. No slot stays empty before the last shard has begun, and no row is lost."""
    values, begin, step = job(tmp_path, inputs, "vllm", 1), Coordinator.begin, VllmEngine.step
    begun: list[int] = []
    in_flight: list[set[int]] = []  # for each step, the shards with rows in flight

    def beginning(self: Coordinator, shard: int) -> bool:
        begun.append(shard)
        return begin(self, shard)

    def stepping(self: VllmEngine) -> Any:
        until = time.monotonic() + 900
        while len(self.rows) + sum(len(call.requests) for call in self._queue) < self.max_rows:
            if len(begun) == ROWS // SHARD_ROWS:
                break
            assert time.monotonic() < until, "slots are free, but the next shard does not come"
            time.sleep(0.001)
        in_flight.append({id(call) for _, call, _ in self.rows.values()})
        return step(self)

    monkeypatch.setattr(Coordinator, "begin", beginning)
    monkeypatch.setattr(VllmEngine, "step", stepping)
    found = run_and_read(values)
    assert sorted(begun) == list(range(ROWS // SHARD_ROWS))
    assert max(map(len, in_flight)) >= 3
    assert found == run_and_read(job(tmp_path, inputs, "builtin", 1))


def test_a_family_that_the_library_engine_lacks_is_answered(inputs: dict[str, Any], tmp_path: Path) -> None:
    model = cases.text_checkpoint(tmp_path / "model", "granite")
    library, values = (job(tmp_path, {**inputs, "model": str(model)}, engine, 1) for engine in ("builtin", "vllm"))
    with pytest.raises(UserError, match="model_type 'granite' is not supported"):
        run_and_read(library)
    tokenizer, whole = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(pq.read_table(inputs["data"])["prompt"][1].as_py(), return_tensors="pt")
    [wanted] = whole.generate(**ids, max_new_tokens=24, do_sample=False)
    values |= {"input": {"path": inputs["data"], "id": "id"}, "sampling": {"max_new_tokens": 24}}
    text = tokenizer.decode(wanted[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert run_and_read(values)[1]["generated_text"] == text.strip()


def test_a_job_of_constant_depth_has_the_library_engines_answers(inputs: dict[str, Any], tmp_path: Path) -> None:
    schedule = {"speedup": 2, "decay": "constant", "prompt": "first", "unadapted": True}
    library, values = (job(tmp_path, inputs, engine, 2, schedule=schedule) for engine in ("builtin", "vllm"))
    assert run_and_read(values) == run_and_read(library)
    assert {row["mean_depth"] for row in shards(values["output"]["path"])} == {cases.LAYERS / 2}


def test_adapt_answers_its_sample(inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "jobs", SimpleNamespace(run=run_in_process))
    found = {}
    for engine in ("builtin", "vllm"):
        config = JobConfig.model_validate(job(tmp_path, inputs, engine, 2, adapt={"rows": 20, "held_out": 4}))
        task, _ = plan_adaptation(config, "job.yaml")
        task.folder.mkdir()
        adaptation._answer(task, adaptation._sample(task)["held_out"], False)
        found[engine] = [read_pairs(task.folder, name) for name in (TRAIN, HELD_OUT)]
    assert found["vllm"] == found["builtin"]
    assert len(found["vllm"][1]) == 4


def test_adapt_times_falling_and_uniform_schedules_in_vllm(inputs: dict[str, Any]) -> None:
    """Quality is scored on the own engine; the speed is chosen by the times of the engine that the job uses."""
    values = job(Path("unused"), inputs, "vllm", 2, sampling={"max_new_tokens": 6, "ignore_eos": True})
    config = JobConfig.model_validate(values)
    model = resolve_checkpoint(config.model, config.storage)
    prompts = [Prompt([7 + row, 8], "x", row) for row in range(6)]
    found = variants(ScheduleSpec(horizon=8, prompt="first"), [1, 2], [UNIFORM])
    scored = score(config, model, found, prompts, runs=1)
    timed = timed_in_vllm(config, model, found, prompts, scored.lines, 2)
    assert [line.name for line in timed] == ["1x", "2x", "2x uniform"]
    for line, own in zip(timed, scored.lines, strict=True):
        assert line.scores == own.scores and line.layer_ratio == own.layer_ratio
        assert line.seconds > 0 and line.seconds != own.seconds


def test_plan_times_each_speed_by_an_engine_that_can_run_it(inputs: dict[str, Any]) -> None:
    """One engine after the other: 1x and each speed of constant depth has its own."""
    settings = EngineSettings(
        inputs["model"],
        unadapted=True,
        sampling={"max_new_tokens": 6, "ignore_eos": True},
        dtype="float32",
        max_batch=4,
        cache_bytes=2**27,
        vllm={"block_size": cases.BLOCK, "max_model_len": 192, "enforce_eager": True},
    )
    constant = ScheduleSpec(speedup=2, decay="constant", prompt="first")
    speeds = {"2x": ScheduleSpec(speedup=2, horizon=8), "constant": constant, "1x": ScheduleSpec()}
    schedules = {name: spec.build(cases.LAYERS) for name, spec in speeds.items()}
    prompts = [Prompt([7 + row, 8], "x", row) for row in range(12)]
    for name, timed in time_speeds(prompts, settings, schedules, 12, 1e6, 1e9).calls.items():
        assert [call.rows for call in timed] == [12]
        mean = timed[0].stats.layer_steps / timed[0].stats.decode_steps
        assert mean == cases.LAYERS if name == "1x" else mean < cases.LAYERS
        assert timed[0].seconds > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reasoning": {}, "choices": LABELS, "sampling": {}}, "model.engine: vllm: choices or output_format after"),
        ({"sampling": {"temperature": 3.0}}, "model.engine: vllm: sampling.temperature must be at most 2"),
        ({"actors": {"gpus": 0.5}}, "model.engine: vllm: an actor needs whole GPUs"),
        (
            {"choices": LABELS, "sampling": {"logprobs": 1}},
            "model.engine: vllm: choices or output_format with log-probabilities need engine: builtin",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_in_one_line(
    inputs: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        run_and_read(job(tmp_path, inputs, "vllm", 2, **changes))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "vllm 2").exists()


def test_auto_is_vllm_on_a_gpu_and_a_job_keeps_its_engine(inputs: dict[str, Any], tmp_path: Path) -> None:
    def chosen(stored: str | None = None, **changes: Any) -> tuple[str, float]:
        values = {**job(tmp_path, inputs, "auto", 2), "actors": {"gpus": 1.0}, **changes}
        config = with_engine(JobConfig.model_validate(values), stored)
        return config.model.engine, config.actors.gpus

    assert chosen() == ("vllm", 1)
    assert chosen(model={"path": inputs["model"], "vllm": {"tensor_parallel_size": 4}}) == ("vllm", 4)
    assert chosen(sampling={"temperature": 3.0}) == ("auto", 1)
    assert chosen(actors={}) == ("auto", 0)
    assert chosen(stored="builtin") == ("builtin", 1)
    assert chosen(stored="vllm", actors={}) == ("vllm", 0)
