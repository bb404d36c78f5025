"""`skipdecode adapt`: pairs, choice, job file and resumption, without a model and without Ray."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from adapt_fakes import END, ROWS, Fakes, Run, values, write_inputs

from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.checkpoints.resolve import RemoteCheckpoint, ResolvedCheckpoint, resolve_checkpoint
from pipeline.checkpoints.stores import HubStore
from pipeline.config.job import JobConfig, ModelConfig, StorageConfig
from pipeline.config.load import load_config, load_values
from pipeline.input.files import list_files
from pipeline.learn.adapt.job_file import full_depth_job, job_text, tuned_model
from pipeline.learn.adapt.pairs import read_pairs
from pipeline.learn.adapt.record import StageRecord
from pipeline.learn.adapt.references import true_answers
from pipeline.learn.adapt.task import Task, spec_to_train
from pipeline.learn.rows import layout, read_sample
from pipeline.learn.score.lines import Line, Score
from pipeline.learn.score.metrics import default_metric
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.prepare.prompts import PROMPT_IDS, prepare_table


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--json", rows=ROWS, references="right")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "out-adapt"
    assert fakes.job.schedule.changes() == {"speedup": 1.0}
    assert (fakes.job.output.token_ids, fakes.job.output.keep, fakes.job.sampling.n) == (True, [], 1)

    # every row is accounted for, once
    sample = pq.read_table(folder / "sample.parquet").to_pylist()
    empty = {row for row in range(ROWS) if row % 5 == 0}
    bad = {row for row, one in enumerate(sample) if one["q"] is None}
    bare = {row for row, one in enumerate(sample) if row < 6 and not one["right"]} - empty
    left = [row for row in range(ROWS) if row not in empty | bad | bare]
    train, held = (pq.read_table(folder / f"{name}.parquet") for name in ("train", "held-out"))
    assert [one[0] - 5 for one in held["response"].to_pylist()] == [row for row in left if row < 6]
    assert [one[0] - 5 for one in train["response"].to_pylist()] == [row for row in left if row >= 6]
    assert json.loads(result.stdout)["counts"] == {
        "job": ROWS,
        "drawn": ROWS,
        "unreadable": 0,
        "train": train.num_rows,
        "dev": 0,  # of too few rows
        "held_out": held.num_rows,
        "errors": len(bad),
        "empty": len(empty - bad),
        "unreferenced": len(bare),
        "repeated": 0,
    }
    answered = json.loads((folder / "adapt.json").read_text())["done"]["answers"]["result"]
    assert answered["row"]["answer"] == 60 / (ROWS - len(bad))  # rows that teach nothing took time too
    for row in train.to_pylist():
        number = row["response"][0] - 5
        assert row["ended"] == (number % 4 != 3)  # cut off: no end to be learned
        assert END not in row["response"]
        assert row["text"] == "x" * len(row["response"])

    # prompts are those of the job's own prepare step
    config = fakes.job
    resolved = resolve_checkpoint(config.model, config.storage)
    whole = prepare_table(pq.read_table(folder / "sample.parquet"), prompt_spec(config, resolved, 0.0))
    by_row = whole[PROMPT_IDS].to_pylist()
    assert train["prompt"].to_pylist() == [by_row[row] for row in left if row >= 6]


def test_the_job_file_is_the_users_with_adapter_and_speed(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--set", "shard_rows=5", "--set", "output.strip=false", output=str(tmp_path / "adapt 1"))
    assert result.exit_code == 0, result.output
    path = tmp_path / "adapt 1" / "job.yaml"
    mine, written = load_values(tmp_path / "job.yaml"), load_values(path)
    mine["model"]["speed_adapter"] = str(tmp_path / "adapt 1" / "speed-adapter")
    mine["schedule"] = {"speedup": 3}
    mine["shard_rows"] = 5
    mine["output"]["strip"] = False
    del mine["adapt"]
    assert written == mine
    assert load_config(JobConfig, path).sampling.stop == ("1e5",)
    assert path.read_text().startswith("# Written by `skipdecode adapt")
    assert f"next: skipdecode run '{path}'" in result.stdout
    assert "break-even: " in result.stdout


def test_a_job_file_that_the_user_has_changed_is_kept(
    tmp_path: Path, fakes: Fakes, command: Run, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "out-adapt" / "job.yaml"
    assert command().exit_code == 0
    path.write_text(mine := path.read_text() + "max_error_rate: 0.5\n")
    for tolerance in (None, 1.5):  # 1.5: no speed is within it
        caplog.clear()
        assert command(tolerance=tolerance).exit_code == (1 if tolerance else 0)
        assert "kept, because adapt did not write it as it is" in caplog.text and path.read_text() == mine
    path.unlink()
    assert command().exit_code == 0 and path.read_text() in mine
    with patch.object(StageRecord, "_save", side_effect=KeyboardInterrupt):  # killed while it writes the job file
        assert command(tolerance=4.0).exit_code == 4
    assert command().exit_code == 0 and path.read_text() in mine


def test_without_a_speed_within_tolerance_no_job_file_is_left(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    assert command().exit_code == 0
    path = tmp_path / "out-adapt" / "job.yaml"
    assert path.exists()
    result = command(tolerance=1.5)
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "skipdecode: no speed-up is within adapt.tolerance = 1.5 of agreement_exact, and no job file is written; "
        "2x would be within a tolerance of 4"
    )
    assert not path.exists()
    wide = command(tolerance=3.5).stderr.strip().splitlines()[-1]
    assert wide.endswith(
        "within a tolerance of 4; if its loss stays 3 with more rows, about 16 held-out rows (now 4) would be enough"
    )
    assert fakes.calls == ["answers", "tune", "before", "after"]  # another tolerance needs no other model
    assert command(tolerance=4.0).exit_code == 0
    assert load_values(path)["schedule"] == {"speedup": 2}


LONG, WORD = [5] * 9, [5]
FULL, FIRST, UNIFORM = ("full", False), ("first", False), ("first", True)  # prompt policy, and whether uniform


@pytest.mark.parametrize(
    ("choices", "references", "response", "metric"),
    [
        (False, None, LONG, "fidelity"),
        (False, None, LONG[:8], "agreement_exact"),
        (True, None, LONG, "agreement_exact"),
        (True, [["yes"], ["no"]], WORD, "exact_match"),
        (False, [["yes"], ["no", "none"]], WORD, "exact_match"),
        (False, [["a summary"], ["of text"]], LONG, "rouge_l"),
        (False, [["这家餐厅在河边，价格便宜。"], ["适合家庭"]], LONG, "rouge_l"),
        (False, [["正面"], ["负面"]], WORD, "exact_match"),
        (False, [["a summary"], ["of text", "or another"]], LONG, "bleu"),
    ],
)
def test_the_default_metric_follows_from_the_held_out_rows(
    choices: bool, references: list[list[str]] | None, response: list[int], metric: str
) -> None:
    assert default_metric(references, [len(response)] * 2, choices=choices) == metric


@pytest.mark.parametrize(
    ("adapt", "schedule", "prompt_seconds", "policies", "written"),
    [
        ({}, {}, 3.3, [FULL], {"speedup": 2}),
        ({}, {}, 3.4, [FULL, FIRST, UNIFORM], {"speedup": 2, "prompt": "first", "decay": "constant"}),
        ({"tolerance": 4.7}, {}, 9, [FULL, FIRST, UNIFORM], {"speedup": 2, "prompt": "first"}),
        ({"tolerance": 4.2}, {}, 9, [FULL, FIRST, UNIFORM], {"speedup": 2}),
        ({}, {"prompt": "full"}, 9, [FULL], {"speedup": 2}),
        ({"prompt": "first", "tolerance": 4.7}, {}, 0, [FIRST, UNIFORM], {"speedup": 2, "prompt": "first"}),
        ({}, {"decay": "constant"}, 9, [FULL, UNIFORM], {"speedup": 2, "prompt": "first", "decay": "constant"}),
    ],
)
def test_a_job_of_long_prompts_is_offered_skipping_in_the_prompt_and_uniform_schedules(
    tmp_path: Path,
    fakes: Fakes,
    command: Run,
    adapt: dict[str, Any],
    schedule: dict[str, Any],
    prompt_seconds: float,
    policies: list[tuple[str, bool]],
    written: dict[str, Any],
) -> None:
    fakes.prompt_seconds = prompt_seconds
    result = command("--json", job={"schedule": {"horizon": 6, **schedule}}, **{"tolerance": 5.0, **adapt})
    assert result.exit_code == 0, result.output
    trained = fakes.recipe.schedules.values()
    assert {one.speedup for one in trained} == {2, 3}  # an adapter is not trained at 1x
    assert {one.prompt for one in trained} == {prompt for prompt, _ in policies}
    lines = json.loads(result.stdout)["after"]
    assert [(line["prompt"], line["uniform"]) for line in lines if line["nominal"] == 2] == policies
    assert ("chosen: 2x" in result.stderr) == (len(policies) > 1)
    assert load_values(tmp_path / "out-adapt" / "job.yaml")["schedule"] == written


@pytest.mark.parametrize("stage", ["answers", "tune", "before", "after"])
def test_an_interrupted_adaptation_resumes_at_its_stage(fakes: Fakes, command: Run, stage: str) -> None:
    fakes.fail = stage
    result = command()
    assert (result.exit_code, "interrupted (SIGTERM)" in result.stderr) == (4, True)
    done = fakes.calls[:-1]
    assert fakes.calls[-1] == stage
    fakes.fail, fakes.calls = "", []
    assert command().exit_code == 0
    assert [*done, *fakes.calls] == ["answers", "tune", "before", "after"]
    fakes.calls = []
    assert command().exit_code == 0
    assert fakes.calls == []


def test_a_lost_checkpoint_is_trained_and_evaluated_again(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    assert command().exit_code == 0
    (tmp_path / "out-adapt" / "speed-adapter" / "tune.json").unlink()
    fakes.calls = []
    assert command().exit_code == 0
    assert fakes.calls == ["tune", "before", "after"]


def test_prompts_of_held_out_rows_are_not_trained_on(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    source = {"path": str(tmp_path / "in"), "template": "say {{ q[-1] }}"}  # ten prompts for 30 rows
    result = command("--json", rows=ROWS, job={"input": source})
    assert result.exit_code == 0, result.output
    counts, folder = json.loads(result.stdout)["counts"], tmp_path / "out-adapt"
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("train", "held-out")]
    train, held = ({tuple(prompt) for prompt in table["prompt"].to_pylist()} for table in tables)
    assert train and held and not train & held
    assert counts["repeated"] > 0
    assert sum(counts[name] for name in ("train", "dev", "held_out", "errors", "empty", "repeated")) == ROWS


def test_references_that_are_no_labels_are_ignored(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    """Else evaluate would refuse the row, after all the training."""
    labels = ["Answer 1", "answer 2", *(f"answer {row}" for row in range(15, ROWS))]
    job = {"choices": labels, "sampling": {}}
    result = command("--json", rows=ROWS, held_out=20, references="right", job=job)
    assert result.exit_code == 0, result.output
    rows = pq.read_table(tmp_path / "out-adapt" / "held-out.parquet")["references"].to_pylist()
    known = {label.lower() for label in labels}
    assert rows and all(row and {text.lower() for text in row} <= known for row in rows)
    assert json.loads(result.stdout)["counts"]["unreferenced"] > 1


def test_answers_to_train_on_may_come_from_a_column(
    tmp_path: Path, fakes: Fakes, command: Run, checkpoint: Path
) -> None:
    """Full depth answers only the held-out rows, with which evaluate compares. A row without an answer is left out."""
    file = tmp_path / "in" / "in-0.parquet"
    pq.write_table(pq.read_table(file).set_column(3, "unused", pa.nulls(13, pa.string())), file)
    assert command("--json", rows=ROWS, responses="unused").exit_code == 0
    folder = tmp_path / "out-adapt"
    sample = pq.read_table(folder / "sample.parquet").to_pylist()
    train, held = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "held-out"))
    x = load_tokenizer(checkpoint)("x", add_special_tokens=False)["input_ids"]
    assert pq.read_table(fakes.job.input.path[0]).to_pylist() == sample[:6]
    taught = [row for row in sample[6:] if row["q"] is not None and row["unused"] is not None]
    assert 0 < len(taught) < 20
    assert [(row["response"], row["ended"], row["text"]) for row in train] == [(x, True, "x")] * len(taught)
    assert all(row["response"][0] - 5 < 6 for row in held)
    assert (fakes.recipe.loss.references, fakes.recipe.loss.distillation) == (1, 0.5)


def test_evaluation_has_the_resources_of_an_actor(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    assert command().exit_code == 0
    # as the answers' job has resolved them
    assert (fakes.actors.threads, fakes.actors.cache_bytes) == (3, 2**20)
    shutil.rmtree(tmp_path / "out-adapt")
    assert command(job={"actors": {"threads": 2, "cache_bytes": 12345}}).exit_code == 0
    assert (fakes.actors.threads, fakes.actors.cache_bytes) == (2, 12345)


def test_memory_in_cycles_is_freed(tmp_path: Path) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    held = []

    def work() -> dict[str, Any]:
        held.append(weakref.ref(Cycle()))
        assert held[0]() is not None
        return {}

    record = StageRecord(tmp_path / "adapt")
    record.begin()
    record.check({"sample": {}})
    gc.disable()
    try:
        record.run("sample", "draw rows", [], work)
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_model_of_the_hub_stays_at_its_commit(checkpoint: Path, tmp_path: Path) -> None:
    local = resolve_checkpoint(ModelConfig(path=str(checkpoint)), StorageConfig())
    remote = RemoteCheckpoint("owner/name@main", HubStore("owner/name", "c0ffee", None, None), "key", (), None)

    def model(path: str, resolved: ResolvedCheckpoint, **adapt: Any) -> tuple[str, dict[str, str]]:
        """The checkpoint that answers the sample, and the model section of the job file that is written."""
        job = JobConfig.model_validate({**values(tmp_path, tmp_path, checkpoint, **adapt), "model": {"path": path}})
        task = Task(job, "job.yaml", Path("adapt"), resolved, [], pa.schema([]), ScheduleSpec(), "")
        return full_depth_job(job, resolved, Path("adapt")).model.path, tuned_model(task)

    pinned, adapter = "owner/name@c0ffee", "adapt/speed-adapter"
    hub = ResolvedCheckpoint(local.checkpoint, remote)
    named = {"path": pinned, "speed_adapter": str(Path(adapter).resolve())}
    assert model("owner/name@main", hub) == (pinned, named)
    assert model("my/model", local) == ("my/model", {"path": "my/model", "speed_adapter": adapter})
    assert model("my/model", local, weights="full") == ("my/model", {"path": "adapt/checkpoint"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"power": 3.0}, ""),
        ({"steps": 2, "decay": "cosine"}, ""),
        ({"power": 3.0, "decay": "power"}, "schedule.power"),
        ({"steps": 2, "decay": "step"}, "schedule.steps"),
    ],
)
def test_keys_that_the_decay_ignores_are_allowed(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    job = {**values(tmp_path, tmp_path / "out", checkpoint), "schedule": changes}
    config = JobConfig.model_validate(job)
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        assert spec_to_train(config, None).decay == changes.get("decay", "linear")
    spec_to_train(config, ScheduleSpec(**changes))  # a checkpoint that has it already is trained for it


def test_without_an_order_of_job_or_checkpoint_it_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    def order(stored: ScheduleSpec | None, **schedule: Any) -> Any:
        job = {**values(tmp_path, tmp_path / "out", checkpoint), "schedule": schedule}
        return spec_to_train(JobConfig.model_validate(job), stored).keep_order

    stored = ScheduleSpec(keep_order=(1, 0, 3, 2), warmup=2, speedup=3.0)
    assert order(None) == order(None, warmup=2) == order(stored, keep_order="measured") == "measured"
    assert order(None, keep_order="paper") == "paper"
    assert order(stored) == (1, 0, 3, 2)


def test_a_line_break_does_not_end_a_comment(checkpoint: Path, tmp_path: Path) -> None:
    config = JobConfig.model_validate(values(tmp_path, tmp_path, checkpoint))
    resolved = resolve_checkpoint(config.model, config.storage)
    task = Task(config, "of\nline", tmp_path, resolved, [], pa.schema([]), ScheduleSpec(), "")
    chosen = Line("2x", 2.0, "full", 2.0, 1.0, {"fidelity": Score(90.0, 1.0, 2.0)})
    text = job_text(task, {"model": {"path": "x"}}, chosen, "fidelity", 2.0, tmp_path / "job.yaml")
    assert yaml.safe_load(text)["schedule"] == {"speedup": 2.0}


def test_a_row_that_the_job_could_not_answer_is_left_out(
    tmp_path: Path, fakes: Fakes, command: Run, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.deadly = 3
    result = command("--json", rows=20)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counts"]["errors"] >= 1
    assert any("row 3: died" in message for message in caplog.messages)


def test_chance_harm_and_useless_speeds_are_told(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    fakes.harmed = ["the training harmed 3x: its dev-set loss is 2.1"]
    fakes.chance = {"agreement_exact": {"value": 95.0, "loss": 5.0, "loss_high": 6.0}}
    result = command(tolerance=20.0)
    assert result.exit_code == 0, result.output
    assert "chance: 95 agreement_exact" in result.stdout and fakes.harmed[0] in result.stdout
    assert "3x is useless, no better than chance: same answer 92.0, by chance 95.0" in result.stdout
    assert "2x *" in result.stdout  # 3x is faster, and within the tolerance
    fakes.chance["agreement_exact"]["value"] = 99.0
    shutil.rmtree(tmp_path / "out-adapt")
    none = command(tolerance=20.0)
    assert none.exit_code == 1 and "every speed-up is useless: none has a higher agreement_exact" in none.stderr


def test_rows_of_their_own_watch_the_training(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--json", rows=ROWS, held_out=4)
    found = json.loads(result.stdout)
    assert found["counts"]["dev"] == 2
    assert len(read_pairs(tmp_path / "out-adapt", "dev.parquet")) == 2


def test_a_column_that_looks_like_true_answers_is_proposed(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    said = "column 'unused' looks like true answers: set adapt.references: unused to choose the speed by"
    labels = {"choices": ["x", "y"], "sampling": {}}
    assert said in command(job=labels).stderr
    assert said not in command(job=labels, references="unused", output=str(tmp_path / "other")).stderr
    assert "looks like" not in command(output=str(tmp_path / "third")).stderr
    for name, text in (
        ("a", b"q,key\nh\xe9,1\n"),
        ("b", b"q,key\n" + b"".join(b"alpha %d,2\n" % row for row in range(30))),
    ):
        (tmp_path / f"{name}.csv").write_bytes(text)
    csv = {"input": {"path": str(tmp_path / "*.csv"), "id": "key", "template": "say {{ q }}"}}
    result = command(job=csv, output=str(tmp_path / "fourth"))
    assert result.exit_code == 0, result.stderr  # although no row of the first file can be read


def test_true_answers_have_a_usual_name_or_are_labels() -> None:
    assert true_answers({"text": ["long enough"], "Label": ["x", None]}) == "Label"
    assert true_answers({"other": ["X ", None], "label": ["z", "x"]}, ["x", "y"]) == "other"
    assert true_answers({"other": ["x"], "label": [1]}) is None


def test_every_stage_is_announced(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--json")
    stages = [line for line in result.stderr.splitlines() if line.startswith("stage ")]
    assert [stage.partition(":")[0] for stage in stages] == [f"stage {number} of 5" for number in range(1, 6)]
    assert stages[0] == "stage 1 of 5: draw 20 of 30 rows"
    seconds, account = (json.loads(result.stdout)[name] for name in ("seconds", "break_even"))
    assert account["cost"] == pytest.approx(sum(seconds.values()) - seconds["before"], rel=1e-9)
    (estimate,) = [line for line in result.stderr.splitlines() if line.startswith("estimate: ")]
    assert " training steps; " in estimate and " left on this machine; by stage: tune " in estimate
    assert re.search(r"; pays from \d+ rows on at 2x, from \d+ rows on at 3x; this job has 30$", estimate)
    assert not [line for line in command("--json").stderr.splitlines() if line.startswith("stage ")]


@pytest.mark.parametrize(
    ("drawn", "groups"), [([29, 3, 0], [(13, 0), (16, 3)]), ([13, 12], [(13, 3), (1, 0)]), ([5, 6], [(13, 1)])]
)
def test_the_sample_is_the_rows_drawn_in_their_order_and_other_row_groups_are_not_read(
    tmp_path: Path, checkpoint: Path, drawn: list[int], groups: list[tuple[int, int]]
) -> None:
    inputs = write_inputs(tmp_path / "in")
    config = JobConfig.model_validate(values(inputs, tmp_path / "out", checkpoint, references="right"))
    files, schema = layout(config, list_files(config.input.path, config.storage))
    whole, plain = pq.read_table(inputs), pq.ParquetFile.iter_batches
    with patch.object(pq.ParquetFile, "iter_batches", autospec=True, side_effect=plain) as read:
        table, readable = read_sample(config, files, schema, drawn)
    assert readable == [True] * len(drawn)
    assert table.column_names == ["key", "q", "right"]  # what the job reads, and the references
    assert table.schema.field("key").type == pa.int16()
    assert table.to_pylist() == whole.select(table.column_names).take(drawn).to_pylist()
    assert [(one.args[0].metadata.num_rows, *one.kwargs["row_groups"]) for one in read.mock_calls] == groups
