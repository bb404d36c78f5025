"""Refusals of `skipdecode adapt` and `evaluate`: one line each, as early as possible."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from adapt_fakes import ROWS, Fakes, Run
from new_model import train_tokenizer
from random_adapter import random_adapter

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.learn.adapt.record import StageRecord
from pipeline.messages import install_command


@pytest.mark.parametrize(
    ("adapt", "job", "named"),
    [
        ({"rows": 19}, {}, "adapt.rows"),
        ({"training": {"epochs": 1.0}}, {}, "adapt.training.epochs"),
        ({"speedups": [1, 2]}, {}, "adapt.speedups"),
        ({"runs": 1}, {}, "adapt.runs"),
        ({}, {"output": {"path": "OUT", "strip": False}}, "output.strip"),
        ({}, {"shared_prefix": False}, "shared_prefix"),
        ({}, {"shard_rows": 3, "shard_bytes": 99}, "shard_bytes, shard_rows"),
        ({}, {"actors": {"max_batch": 3, "threads": 1}}, "actors.max_batch, actors.threads"),
        ({}, {"actors": {"cache_bytes": 9}}, "actors.cache_bytes"),
        ({}, {"sampling": {"max_new_tokens": 9}}, "sampling.max_new_tokens, sampling.stop"),
        ({}, {"schedule": {"decay": "cosine"}}, "schedule.decay"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, fakes: Fakes, command: Run, adapt: dict[str, Any], job: dict[str, Any], named: str
) -> None:
    assert command().exit_code == 0
    if "output" in job:
        job = {"output": {**job["output"], "path": str(tmp_path / "out")}}
    result = command(job=job, **adapt)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and f"differs in {named}; remove the folder, or choose another adapt.output" in lines[0]


def test_an_adapter_to_go_on_from_that_has_changed_is_refused(
    tmp_path: Path, checkpoint: Path, fakes: Fakes, command: Run
) -> None:
    start = random_adapter(checkpoint, tmp_path / "start", ScheduleSpec(speedup=2, horizon=6))
    going_on = {"adapter": {"start": str(start)}}
    assert command(**going_on).exit_code == 0
    random_adapter(checkpoint, start, ScheduleSpec(speedup=2, horizon=6), rank=2)
    result = command(**going_on)
    assert result.exit_code == 2 and "differs in adapt.adapter.start.weights; remove the folder" in result.stderr


def test_options_of_a_stage_not_done_may_still_change(fakes: Fakes, command: Run) -> None:
    fakes.fail = "tune"
    assert command().exit_code == 4
    fakes.fail = ""
    assert command(training={"epochs": 1.0}).exit_code == 0
    assert fakes.recipe.training.epochs == 1.0
    assert fakes.calls == ["answers", "tune", "tune", "before", "after"]


def test_new_input_files_are_logged_and_not_sampled(
    tmp_path: Path, fakes: Fakes, command: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert command().exit_code == 0 and not caplog.messages
    sample = (tmp_path / "out-adapt" / "sample.parquet").read_bytes()
    pq.write_table(pa.table({"key": pa.array([99], pa.int16()), "q": ["more"]}), tmp_path / "in" / "more.parquet")
    result = command("--json", tolerance=4.0)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["counts"]["job"] == ROWS + 1
    assert [one.partition(": ")[2] for one in caplog.messages] == [
        "changed since the sample was drawn; new rows are not sampled"
    ]
    assert (tmp_path / "out-adapt" / "sample.parquet").read_bytes() == sample
    assert fakes.calls == ["answers", "tune", "before", "after"]


LABELS = {"choices": ["y", "n"], "sampling": {}}


@pytest.mark.parametrize(
    ("program", "adapt", "job", "key"),
    [
        ("adapt", {"rows": 6}, {}, "rows"),
        ("adapt", {"rows": 99, "held_out": 30}, {}, "adapt.held_out"),
        ("both", {"references": "wrong"}, {}, "'wrong'"),
        ("both", {"references": "key"}, {}, "adapt.references"),
        ("both", {"metric": "bleu"}, {}, "metric"),
        ("adapt", {"output": "s3://bucket/x"}, {}, "adapt.output: s3://bucket/x is not local"),
        ("adapt", {}, {"output": {"path": "s3://bucket/x=1"}}, "adapt.output: s3://bucket/x-1-adapt is not local"),
        ("adapt", {"speedups": [1]}, {}, "speedups"),
        ("adapt", {"speedups": [2, 2.0000001]}, {}, "speedups"),
        ("both", {"training": {"epoch": 1.0}}, {}, "training.epoch"),
        ("both", {"adapter": {"rank": 0}}, {}, "adapter.rank"),
        ("both", {"adapter": {"start": "start", "rank": 8}}, {}, "adapter.rank"),
        ("adapt", {"adapter": {"targets": ["no_proj"]}}, {}, "adapt.adapter.targets"),
        ("adapt", {"adapter": {"start": "CHECKPOINT"}}, {}, "adapt.adapter.start"),
        ("adapt", {"loss": {"teacher": "/nowhere"}}, {}, "adapt.loss.teacher"),
        ("adapt", {"loss": {"teacher": "OTHER"}}, {}, "adapt.loss.teacher"),
        ("both", {"weights": "full", "adapter": {"rank": 2}}, {}, "adapter"),
        ("both", {"loss": {"distillation": 0.0}}, {}, "loss"),
        ("both", {"loss": {"label_smoothing": 0.1}}, {}, "label_smoothing"),
        ("adapt", {}, {"schedule": {"decay": "power", "power": 3.0}}, "schedule.power"),
        ("both", {}, {"schedule": {"keep_order": [0, 1], "horizon": 5}}, "keep_order"),
        ("evaluate", {}, {"schedule": {"keep_order": "measured", "horizon": 5}}, "keep_order"),
        ("adapt", {"responses": "right"}, {}, "adapt.responses"),
        ("adapt", {"responses": "q"}, LABELS, "adapt.responses"),
        ("both", {"metric": "fidelity"}, LABELS, "adapt.metric"),
        ("evaluate", {"metric": "rouge_l", "references": "unused"}, {}, "adapt.metric"),
        ("both", {}, {"input": {"path": "in", "prompt": "q", "chat": True, "tools": "t"}}, "input.tools"),
        ("both", {}, {"reasoning": {}}, "reasoning"),
        ("both", {}, {"output_format": {"regex": "a"}, "sampling": {}}, "output_format"),
        ("both", {"held_out": 1}, {}, "held_out"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_before_a_model_is_loaded(
    tmp_path: Path,
    checkpoint: Path,
    fakes: Fakes,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    adapt: dict[str, Any],
    job: dict[str, Any],
    key: str,
) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    train_tokenizer(["quite other words"], vocab_size=290).save_pretrained(tmp_path / "other")
    monkeypatch.setattr("pipeline.learn.score.run.Generator", lambda *_, **__: pytest.fail("a model was loaded"))
    text = json.dumps(adapt).replace("CHECKPOINT", str(checkpoint)).replace("OTHER", str(tmp_path / "other"))
    for name in ("adapt", "evaluate") if program == "both" else (program,):
        result = command(program=name, job=job, **json.loads(text))
        assert result.exit_code == 2, result.output
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1 and key in lines[0], result.stderr
        assert lines[0].count("job.yaml: ") == 1
    assert fakes.calls == [] and not (tmp_path / "out-adapt").exists()


def test_too_few_rows_are_refused_before_training(fakes: Fakes, command: Run) -> None:
    fakes.empty = True
    result = command()
    assert (result.exit_code, fakes.calls) == (2, ["answers"])
    assert "out-adapt: 0 rows are left to evaluate. Of the 20 in the sample" in result.stderr


@pytest.mark.parametrize("place", ["out", "out/adapt", "checkpoint", "checkpoint/adapt", "in/adapt", "start/adapt"])
def test_the_folder_must_not_share_with_another(
    tmp_path: Path, checkpoint: Path, fakes: Fakes, command: Run, place: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    start = random_adapter(checkpoint, tmp_path / "start", ScheduleSpec(speedup=2, horizon=6))
    model = {"path": str(tmp_path / "checkpoint"), "dtype": "float32"}
    result = command(job={"model": model}, output=str(tmp_path / place), adapter={"start": str(start)})
    lines = result.stderr.strip().splitlines()
    assert (result.exit_code, len(lines), fakes.calls) == (2, 1, [])
    assert re.search("overlap; choose another folder|adapt.output: .* lies in the input folder", lines[0])


def test_on_a_cluster_the_folder_must_be_named(
    tmp_path: Path, fakes: Fakes, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    result = command()
    lines = result.stderr.strip().splitlines()
    assert (result.exit_code, len(lines), fakes.calls) == (2, 1, [])
    assert "adapt.output: all nodes of the cluster must read and write" in lines[0]
    assert command(output=str(tmp_path / "shared")).exit_code == 0
    assert Path(fakes.job.input.path[0]).is_absolute() and Path(fakes.job.output.path).is_absolute()


def test_a_text_metric_of_labels_is_refused_before_training(fakes: Fakes, command: Run) -> None:
    result = command(references="unused", metric="bleu")
    assert (result.exit_code, fakes.calls) == (2, ["answers"])
    assert "adapt.metric: bleu is not a metric for labels, and the references of all " in result.stderr
    assert command(references="unused", metric="exact_match", tolerance=20).exit_code == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ModuleNotFoundError("no", name="peft"), 2, f"peft is not installed: {install_command('tune')}"),
        (RuntimeError("a worker\nended"), 1, "failed: ended; the same command resumes from the last stage"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. And\nmore."),
            1,
            "failed: CUDA out of memory; lower adapt.training.batch_size or actors.max_batch; the same command resumes",
        ),
    ],
)
def test_a_failed_stage_is_one_line(fakes: Fakes, command: Run, error: Exception, code: int, said: str) -> None:
    fakes.error = error
    result = command()
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith(("stage ", "estimate: "))]
    assert (result.exit_code, len(lines)) == (code, 1)
    assert said in lines[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"done": {"sample": 5}}, "done.sample: Input should be"),
        ({"done": {"sample": {"settings": {}}}}, "done.sample.result: Field required"),
        ({"done": {"other": {"settings": {}, "result": {}}}}, "done.other.[key]: Input should be"),
        ({"seconds": {"sample": "long"}}, "seconds.sample: Input should be"),
        ({"format": 3}, "format: Input should be 4"),
    ],
)
def test_a_damaged_record_is_one_line(
    tmp_path: Path, fakes: Fakes, command: Run, values: dict[str, Any], said: str
) -> None:
    (tmp_path / "out-adapt").mkdir()
    record = {"format": 4, "done": {}, "seconds": {}, **values}
    (tmp_path / "out-adapt" / "adapt.json").write_text(json.dumps(record))
    result = command()
    assert (result.exit_code, result.stderr.count("\n"), fakes.calls) == (2, 1, [])
    assert f"adapt.json: cannot be read: {said}" in result.stderr and "; remove the folder" in result.stderr


def test_a_folder_of_the_user_is_refused_and_untouched(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    folder = tmp_path / "out-adapt"
    folder.mkdir()
    (folder / "job.yaml").write_text("mine")
    result = command()
    assert (result.exit_code, result.stderr.count("\n"), fakes.calls) == (2, 1, [])
    assert "holds 'job.yaml' and no adapt.json of an earlier run; choose an empty or a new folder" in result.stderr
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]


def test_a_job_file_of_the_user_in_an_adaptations_folder_is_kept(
    tmp_path: Path, fakes: Fakes, command: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert command(tolerance=1.5).exit_code == 1  # no job file is written
    path = tmp_path / "out-adapt" / "job.yaml"
    path.write_text("mine")
    for tolerance in (1.5, 4.0):  # would remove it, would replace it
        caplog.clear()
        command(tolerance=tolerance)
        assert "job.yaml: kept, because adapt did not write it" in caplog.text and path.read_text() == "mine"
    path.unlink()
    assert command(tolerance=4.0).exit_code == 0 and path.read_text() != "mine"


@pytest.mark.parametrize(("below", "why"), [("", "File exists"), ("out", "Not a directory")])
def test_a_file_in_place_of_the_folder_is_refused(
    tmp_path: Path, fakes: Fakes, command: Run, below: str, why: str
) -> None:
    (tmp_path / "file").touch()
    result = command(output=str(tmp_path / "file" / below))
    assert (result.exit_code, fakes.calls) == (2, [])
    assert "adapt.output: " in result.stderr and f"cannot be created: {why}" in result.stderr


def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match=r"^adapt.output: .*: not writable"):
        StageRecord(tmp_path / "out").begin()


def test_an_adaptation_killed_before_its_first_stage_goes_on(
    tmp_path: Path, fakes: Fakes, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.learn.adapt.run.leased", killed)
        assert command().exit_code != 0
    assert command().exit_code == 0
