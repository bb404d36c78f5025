"""`skipdecode adapt`: what is drawn, trained on, chosen, written and done again, without a model and without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline import adapt as adaptation
from pipeline import adapt_configs as configs
from pipeline.adapt_configs import job_text
from pipeline.adapt_pairs import split_end
from pipeline.adapt_sample import draw, layout, write_sample
from pipeline.checkpoints import locate
from pipeline.cli import app
from pipeline.config import JobConfig, StorageConfig
from pipeline.config_file import dump_values, load_config, load_values
from pipeline.lease import Interrupted
from pipeline.manifest import plan_job
from pipeline.prepare import PROMPT_IDS, prepare_table, prompt_spec
from pipeline.source import list_files
from pipeline.storage import open_folder

ROWS = 30
END = 2  # of the tiny checkpoint
WORDS = ["alpha", "bravo", "charlie", "delta"]


def write_inputs(folder: Path) -> Path:
    """Three files, 30 rows, in row groups of 4; row 7 has no prompt, row 11 two references, row 12 none."""
    folder.mkdir()
    prompts: list[str | None] = [f"{WORDS[row % 4]} {row}" for row in range(ROWS)]
    prompts[7] = None
    references = [[f"answer {row}"] * (1 + (row == 11)) for row in range(ROWS)]
    references[12] = []
    for number, (first, end) in enumerate(((0, 13), (13, 14), (14, ROWS))):
        table = pa.table(
            {
                "key": pa.array(range(first, end), pa.int16()),
                "q": prompts[first:end],
                "right": references[first:end],
                "unused": ["x"] * (end - first),
            }
        )
        pq.write_table(table, folder / f"in-{number}.parquet", row_group_size=4)
    return folder


def values(inputs: Path | str, answers: Path, checkpoint: Path, **adapt: Any) -> dict[str, Any]:
    return {
        "input": {"path": str(inputs), "id": "key", "template": "say {{ q }}"},
        "output": {"path": str(answers), "keep": ["key"]},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "schedule": {"speedup": 2, "horizon": 6},
        "sampling": {"max_new_tokens": 8, "stop": ["1e5"]},
        "adapt": {"rows": 20, "held_out": 6, "speedups": [1, 2, 3], **adapt},
    }


# what is drawn


@given(st.integers(0, 200), st.integers(1, 250), st.integers(0, 5))
def test_rows_are_drawn_without_replacement(total: int, count: int, seed: int) -> None:
    drawn = draw(total, count, seed)
    assert len(set(drawn)) == len(drawn) == min(count, total)
    assert all(0 <= row < total for row in drawn)
    assert drawn == draw(total, count, seed)


def test_every_row_is_drawn_as_often() -> None:
    hits = [0] * 10
    for seed in range(2000):
        for row in draw(10, 3, seed):
            hits[row] += 1
    assert all(abs(one - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5 for one in hits), hits


def sampled(config: JobConfig, drawn: list[int], path: Path) -> pa.Table:
    files, schema = layout(config, list_files(config.input.path, config.storage))
    assert write_sample(config, files, schema, drawn, path) == [True] * len(drawn)
    return pq.read_table(path)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
def test_the_sample_is_the_rows_drawn_in_their_order(inputs: Path, checkpoint: Path, drawn: list[int]) -> None:
    folder = inputs.parent
    config = JobConfig.model_validate(values(inputs, folder / "out", checkpoint, references="right"))
    table = sampled(config, drawn, folder / "sample.parquet")
    whole = pq.read_table(inputs)
    assert table.column_names == ["key", "q", "right"]  # what the job reads, and the references
    assert table.schema.field("key").type == pa.int16()
    assert table.to_pylist() == whole.select(table.column_names).take(drawn).to_pylist()


def test_only_row_groups_with_drawn_rows_are_read(
    inputs: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JobConfig.model_validate(values(inputs, tmp_path / "out", checkpoint))
    read: list[tuple[str, int]] = []
    plain = pq.ParquetFile.iter_batches

    def noting(file: Any, *args: Any, row_groups: list[int], **more: Any) -> Any:
        read.append((str(file.metadata.num_rows), row_groups[0]))
        return plain(file, *args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    sampled(config, [29, 3, 0], tmp_path / "sample.parquet")
    assert read == [("13", 0), ("16", 3)]


def test_the_sample_of_a_bucket(s3: StorageConfig, inputs: Path, tmp_path: Path, checkpoint: Path) -> None:
    bucket = open_folder("s3://bucket/adapt", s3)
    for path in inputs.iterdir():
        bucket.replace(path.name, path.read_bytes())
    job = {**values("s3://bucket/adapt", tmp_path / "out", checkpoint), "storage": s3.model_dump()}
    table = sampled(JobConfig.model_validate(job), [20, 4], tmp_path / "sample.parquet")
    assert table["key"].to_pylist() == [20, 4]


# what is trained on


@given(st.lists(st.integers(0, 9), max_size=8))
def test_an_answer_keeps_all_tokens_but_one_end(tokens: list[int]) -> None:
    response, ended = split_end(tokens, END)
    assert response + [END] * ended == tokens
    assert split_end(tokens, None) == (tokens, False)  # a model without an end token


# the flow, over answers, training and measurements that are pretended


class Fakes:
    """Stands in for the pipeline, tune and evaluate. Row r of the sample: r % 5 tokens of answer, of every fourth
    one cut off; `fail` names a stage that is interrupted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls, self.fail, self.empty = folder, [], "", False
        self.losses: dict[float, float] = {1.0: 0.0, 2.0: 3.0, 3.0: 8.0}
        patch.setattr(adaptation.jobs, "run", self.run)
        patch.setattr(adaptation, "_tune", self.tune)
        patch.setattr(adaptation, "_evaluate", self.evaluate)

    calls: list[str]

    def note(self, stage: str) -> None:
        self.calls.append(stage)
        if stage == self.fail:
            raise Interrupted("SIGTERM")

    def run(self, config: JobConfig, *, verbose: bool) -> Any:
        self.note("answers")
        self.job = config
        sample = pq.read_table(config.input.path[0])
        rows = []
        for row, prompt in enumerate(sample["q"].to_pylist()):
            tokens = [] if self.empty else [5 + row] * (row % 5)
            rows.append(
                {
                    "id": f"sample.parquet:{row}",
                    "sample_index": 0,
                    "generated_text": "x" * len(tokens),
                    "token_ids": tokens if row % 4 == 3 else [*tokens, END],
                    "error": "prompt is null" if prompt is None else None,
                }
            )
        schema = pa.schema(
            [
                ("id", pa.string()),
                ("sample_index", pa.int32()),
                ("generated_text", pa.string()),
                ("token_ids", pa.list_(pa.int32())),
                ("error", pa.string()),
            ]
        )
        out = Path(config.output.path)
        out.mkdir(exist_ok=True)
        for part, first in enumerate(range(0, len(rows), 7)):
            pq.write_table(pa.Table.from_pylist(rows[first : first + 7], schema), out / f"part-{part:06d}.parquet")
        return SimpleNamespace(manifest=SimpleNamespace(batching=SimpleNamespace(planned=0.0)))

    def tune(self, task: Any, longest: int) -> dict[str, Any]:
        self.note("tune")
        self.longest = longest
        configs.tune_config(task.config, task.shape, str(task.located.source), longest, task.folder, task.source)
        (task.folder / "checkpoint").mkdir(exist_ok=True)
        (task.folder / "checkpoint" / "tune.json").write_text("{}")
        return {}

    def evaluate(self, task: Any, reference: str | None) -> dict[str, Any]:
        self.note("before" if reference is None else "after")
        lines = [] if reference is None else [self.line(None, 0.0, 0.1)]
        for nominal, loss in self.losses.items():
            lines.append(self.line(nominal, loss + 40 * (reference is None), 0.1 / nominal))
        return {"lines": lines}

    @staticmethod
    def line(nominal: float | None, loss: float, seconds: float) -> dict[str, Any]:
        scores = {
            name: {"value": 100 - loss, "loss": loss, "loss_high": loss + 1}
            for name in ("agreement_rouge_l", "agreement_exact")
        }
        return {"nominal": nominal, "layer_ratio": nominal or 1.0, "seconds": seconds, "scores": scores}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


Run = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, checkpoint: Path) -> Run:
    """The command over the inputs, with keys of `adapt` and options."""
    inputs = write_inputs(tmp_path / "in")

    def run(*options: str, job: dict[str, Any] | None = None, **adapt: Any) -> Result:
        file = tmp_path / "job.yaml"
        given = {**values(inputs, tmp_path / "out", checkpoint, **adapt), **(job or {})}
        file.write_text(dump_values(given))
        return CliRunner().invoke(app, ["adapt", str(file), *options])

    return run


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--json", rows=ROWS, references="right")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "out-adapt"
    found = json.loads(result.stdout)
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
    assert found["counts"] == {
        "job": ROWS,
        "drawn": ROWS,
        "unreadable": 0,
        "train": train.num_rows,
        "held_out": held.num_rows,
        "errors": len(bad),
        "empty": len(empty - bad),
        "unreferenced": len(bare),
        "longest": fakes.longest,
    }
    for row in train.to_pylist():
        number = row["response"][0] - 5
        assert row["ended"] == (number % 4 != 3)  # cut off: no end to be learned
        assert END not in row["response"]
        assert row["text"] == "x" * len(row["response"])

    # prompts are those of the job's own prepare step
    config = fakes.job
    located = locate(config.model, config.storage)
    whole = prepare_table(pq.read_table(folder / "sample.parquet"), prompt_spec(config, located, 0.0))
    by_row = whole[PROMPT_IDS].to_pylist()
    assert train["prompt"].to_pylist() == [by_row[row] for row in left if row >= 6]
    pairs = [*train.to_pylist(), *held.to_pylist()]
    assert fakes.longest == max(len(one["prompt"]) + len(one["response"]) + one["ended"] for one in pairs)


def test_the_job_file_is_the_users_with_checkpoint_and_speed(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command("--set", "shard_rows=5", "--set", "output.strip=false")
    assert result.exit_code == 0, result.output
    path = tmp_path / "out-adapt" / "job.yaml"
    mine, written = load_values(tmp_path / "job.yaml"), load_values(path)
    mine["model"]["path"] = str(tmp_path / "out-adapt" / "checkpoint")
    mine["schedule"] = {"speedup": 3}
    mine["shard_rows"] = 5
    mine["output"]["strip"] = False
    del mine["adapt"]
    assert written == mine
    assert load_config(JobConfig, path).sampling.stop == ("1e5",)
    assert path.read_text().startswith("# Written by `skipdecode adapt")
    assert f"next: skipdecode run {path}" in result.stdout
    assert "break-even: " in result.stdout


def test_without_a_speed_within_tolerance_no_job_file_is_left(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    assert command().exit_code == 0
    path = tmp_path / "out-adapt" / "job.yaml"
    assert path.exists()
    result = command(tolerance=1.5)
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "skipdecode: no speed-up is within adapt.tolerance = 1.5 of agreement_rouge_l, and no job file is written; "
        "2x would be within 4"
    )
    assert not path.exists()
    assert fakes.calls == ["answers", "tune", "before", "after"]  # another tolerance needs no other model
    assert command(tolerance=4.0).exit_code == 0
    assert load_values(path)["schedule"] == {"speedup": 2}


@pytest.mark.parametrize("stage", ["answers", "tune", "before", "after"])
def test_what_was_interrupted_goes_on_from_that_stage(fakes: Fakes, command: Run, stage: str) -> None:
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
    (tmp_path / "out-adapt" / "checkpoint" / "tune.json").unlink()
    fakes.calls = []
    assert command().exit_code == 0
    assert fakes.calls == ["tune", "before", "after"]


@pytest.mark.parametrize(
    ("adapt", "job", "named"),
    [
        ({"seed": 1}, {}, "adapt.seed"),
        ({"rows": 19}, {}, "adapt.rows"),
        ({"training": {"epochs": 1.0}}, {}, "adapt.training.epochs"),
        ({"speedups": [1, 2]}, {}, "adapt.speedups"),
        ({"runs": 1}, {}, "adapt.runs"),
        ({}, {"sampling": {"max_new_tokens": 9}}, "sampling.max_new_tokens, sampling.stop"),
        ({}, {"schedule": {"decay": "cosine"}}, "schedule.decay"),
    ],
)
def test_other_settings_are_refused_by_name(
    fakes: Fakes, command: Run, adapt: dict[str, Any], job: dict[str, Any], named: str
) -> None:
    assert command().exit_code == 0
    result = command(job=job, **adapt)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and f"differs in {named}; remove the folder, or choose another adapt.output" in lines[0]


def test_options_of_a_stage_not_done_may_still_change(fakes: Fakes, command: Run) -> None:
    fakes.fail = "tune"
    assert command().exit_code == 4
    fakes.fail = ""
    assert command(training={"epochs": 1.0}).exit_code == 0
    assert fakes.calls == ["answers", "tune", "tune", "before", "after"]


def test_input_that_has_changed_is_refused(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    assert command().exit_code == 0
    pq.write_table(pa.table({"key": pa.array([99], pa.int16()), "q": ["more"]}), tmp_path / "in" / "more.parquet")
    assert "differs in input.files" in command().stderr


@pytest.mark.parametrize(
    ("adapt", "job", "said"),
    [
        ({"rows": 6}, {}, "adapt: rows = 6 leaves none to train on beside held_out = 6"),
        ({"rows": 99, "held_out": 30}, {}, "30 rows leave none to train on beside adapt.held_out = 30"),
        ({"references": "wrong"}, {}, "no column 'wrong'; it has key, q, right, unused"),
        ({"metric": "bleu"}, {}, "adapt: metric: bleu needs references"),
        ({"output": "s3://bucket/x"}, {}, "adapt.output: s3://bucket/x is not local"),
        ({}, {"output": {"path": "s3://bucket/x"}}, "adapt.output: s3://bucket/x-adapt is not local"),
        ({"speedups": [1]}, {}, "speedups must be 1 or above, and one of them above 1"),
        ({"speedup": [1]}, {}, "unknown key adapt.speedup; did you mean speedups?"),
        ({"training": {"epoch": 1.0}}, {}, "adapt: unknown key training.epoch; did you mean epochs?"),
        ({"training": {"early_stopping": 2}}, {}, "training.early_stopping would choose by the held-out rows"),
        ({"lora": {"rank": 2}}, {}, "adapt: lora.targets is missing"),
        ({"lora": {"merge": False, "targets": ["q_proj"]}}, {}, "lora.merge: the job needs a whole checkpoint"),
        ({"loss": {"distillation": 0.0}}, {}, "there is nothing to learn from"),
        ({}, {"schedule": {"power": 3.0}}, "schedule.power: adapt trains for 2.0 alone"),
        ({}, {"model": {"path": "/none"}}, "/none: no such checkpoint folder"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_model_is_loaded(
    tmp_path: Path, fakes: Fakes, command: Run, adapt: dict[str, Any], job: dict[str, Any], said: str
) -> None:
    result = command(job=job, **adapt)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], result.stderr
    assert lines[0].count("job.yaml: ") == 1
    assert fakes.calls == [] and not (tmp_path / "out-adapt").exists()


def test_the_folder_must_not_lie_in_the_input(tmp_path: Path, fakes: Fakes, command: Run) -> None:
    result = command(output=str(tmp_path / "in" / "adapt"))
    assert result.exit_code == 2
    assert "adapt.output: " in result.stderr and "lies in the input folder" in result.stderr


def test_too_few_rows_left_is_told_before_training(fakes: Fakes, command: Run) -> None:
    fakes.empty = True
    result = command()
    assert (result.exit_code, fakes.calls) == (2, ["answers"])
    assert "out-adapt: 0 rows left to evaluate: of 20 answered at full depth" in result.stderr


def test_labels_are_judged_by_being_the_same(checkpoint: Path, tmp_path: Path) -> None:
    job = {**values(tmp_path, tmp_path, checkpoint), "choices": ["yes", "no"]}
    job["sampling"] = {"temperature": 1.0, "n": 2, "logprobs": 3}
    config = JobConfig.model_validate(job)
    assert configs.metric(config) == "agreement_exact"
    asked = configs.eval_values(config, {"horizon": 6}, "m", "r", tmp_path / "after", tmp_path)
    assert asked["choices"] == ["yes", "no"]
    assert asked["data"]["references"] is None
    assert {name: asked["sampling"][name] for name in ("temperature", "n", "logprobs")} == {
        "temperature": 0.0,
        "n": 1,
        "logprobs": None,
    }


# beside the command


def test_run_does_not_mind_the_section(inputs: Path, tmp_path: Path, checkpoint: Path) -> None:
    """Another, or none: the job is the same one."""
    prints = set()
    for adapt in ({"rows": 10, "held_out": 2, "seed": 3}, {"metric": "token_kl"}, None):
        job = {**values(inputs, tmp_path / "out", checkpoint), "adapt": adapt}
        config = JobConfig.model_validate(job)
        located = locate(config.model, config.storage)
        schedule = located.checkpoint.schedule(config.schedule.changes())
        prints.add(plan_job(config, located, schedule, None, None).fingerprint)
    assert len(prints) == 1


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
numbers_as_text = st.from_regex(r"[-+]?[0-9]{1,3}(\.[0-9]{0,2})?[eE][-+]?[0-9]{1,2}", fullmatch=True)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(min_size=1, max_size=5), scalars | numbers_as_text | st.lists(scalars, max_size=3)))
def test_values_written_are_read_back_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, rest: dict[str, Any]
) -> None:
    job = {**rest, "model": {"path": "x", "cache": "1e5"}, "adapt": {"rows": 3}}
    path = tmp_path_factory.mktemp("yaml") / "job.yaml"
    path.write_text(job_text(job, "y", 2.5, ["of\nline"]))
    want = {**job, "model": {"path": "y", "cache": "1e5"}, "schedule": {"speedup": 2.5}}
    del want["adapt"]
    assert load_values(path) == want
    assert yaml.safe_load(path.read_text())["model"]["path"] == "y"
