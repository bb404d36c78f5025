"""`skipdecode adapt` with real answers, training and evaluation, and the job that it writes. No Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.load import dump_yaml
from pipeline.learn.adapt import configs

ROWS = 40
PROMPTS: list[str | None] = [f"name[Zizzi], area[{row}]" for row in range(ROWS)]
TRAINED = {"training": {"max_steps": 2, "batch_size": 4, "bf16": False, "threads": 1}, "runs": 1}


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
        "schedule": {"agreement_rows": 0},
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
    monkeypatch.setattr(configs, "PROMPT_SHARE", 2.0)  # else the clock decides whether `prompt: first` is tried
    prompts = [*PROMPTS[:7], None, *PROMPTS[8:]]
    adapt = {**TRAINED, "speedups": [1, 2], "tolerance": 100.0, "weights": weights}
    schedule = {"agreement_rows": 0, **({"keep_order": "measured"} if weights == "full" else {})}
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
    assert json.loads((trained / "tune.json").read_text())["steps"] == 2
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
    lines = [(line["nominal"], line["prompt"]) for line in found["after"]]
    assert lines == [(1, "full"), (3, "full"), (3, "first")]
    tuned = json.loads((tmp_path / "out-adapt" / "speed-adapter" / "tune.json").read_text())
    assert [(one["speedup"], one["prompt"]) for one in tuned["config"]["schedule"]["also"]] == [(3, "first")]
    written = yaml.safe_load(Path(found["job_file"]).read_text())["schedule"]
    assert written.get("prompt", "full") == found["chosen"]["prompt"]


def test_a_probe_says_what_an_adaptation_could_give(in_process: None, tmp_path: Path, checkpoint: Path) -> None:
    write_job(tmp_path, checkpoint, PROMPTS, {}, sampling={"max_new_tokens": 10})
    found, shown = run_command("adapt", tmp_path / "job.yaml", "--probe")
    assert [one["layers"] for one in found["kept_layers"]] == [4, 3, 2]
    assert found["kept_layers"][0]["token_kl"] == pytest.approx(0, abs=1e-6)
    clocks = [one["clock"] for one in found["speeds"]]
    assert clocks == sorted(clocks) and clocks[0] > 1 and clocks[-1] < 4
    assert all(found["seconds"][name] > 0 for name in ("prompt", "decode", "head")) and found["adaptation_seconds"] > 0
    assert "this job has 40 rows, so it is not worth it" in shown and not found["worth_it"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["in.parquet", "job.yaml"]
