"""A job of which no sampled row can be answered is refused when it is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import poison_stages
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import InProcess

from actors.engine.errors import UserError
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig, ModelConfig, StorageConfig
from pipeline.input.files import Files, list_files
from pipeline.plan import sample
from pipeline.plan.hardware import Hardware
from pipeline.plan.manifest import Manifest, plan_job
from pipeline.run.ray_data import RayData

RULES = "Name the place, its area and its food in one line."


def plan(
    folder: Path,
    checkpoint: Path,
    stored: Manifest | None = None,
    hardware: Hardware | None = None,
    files: Files | None = None,
    **sections: Any,
) -> Manifest:
    values = {"output": {"path": "out"}, "model": {"path": str(checkpoint)}, "shard_rows": 40, **sections}
    values["input"] = {"path": str(folder), "template": RULES + " {{ q }}", **sections.get("input", {})}
    config = JobConfig.model_validate(values)
    found = resolve_checkpoint(config.model, config.storage)
    return plan_job(config, found, found.checkpoint.schedule({}), None, stored, files, hardware=hardware)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        questions = [f"{row} {name}" for row in range(100)]
        pq.write_table(pa.table({"q": questions, "n": [None] * 99 + [1]}), folder / f"{name}.parquet")
    return folder


def test_a_job_of_which_no_sampled_row_can_be_answered_is_refused(
    tmp_path: Path, inputs: Path, checkpoint: Path
) -> None:
    told = r"none of 32 sampled rows can be answered; the first error: .*max_error_rate: 1 runs the job all the same"
    bad = {"input": {"template": "{{ 1 + n }}"}}
    with pytest.raises(UserError, match=told):
        plan(inputs, checkpoint, **bad)
    assert plan(inputs, checkpoint, files=list_files([str(inputs)], StorageConfig()), **bad).rows == 200  # incremental
    (inputs / "b.parquet").unlink()
    assert plan(inputs, checkpoint, **bad).rows == 100  # too few rows are sampled
    texts = {"p": [f"{row} " + "alpha " * 200 for row in range(100)]}
    for name in ("a", "b"):
        pq.write_table(pa.table(texts), tmp_path / "in" / f"{name}.parquet")
    with pytest.raises(UserError, match="leaves no room"):
        plan(inputs, checkpoint, input={"prompt": "p", "template": None})


def test_short_texts_that_fail_are_refused(tmp_path: Path, chat_checkpoint: Path) -> None:
    """A label or the job's own message leaves no room for them, or they are not UTF-8."""
    context = resolve_checkpoint(ModelConfig(path=str(chat_checkpoint)), StorageConfig()).checkpoint.context_length
    section = {"prompt": "p", "template": None}
    for name in "ab":
        texts = [f"alpha pub food riverside {row}" for row in range(100)]
        pq.write_table(pa.table({"p": texts}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="leaves no room for a label"):
        plan(tmp_path, chat_checkpoint, input=section, choices=["pub", " ".join(["alpha"] * (context - 3))])
    with pytest.raises(UserError, match="leaves no room in a context"):
        plan(tmp_path, chat_checkpoint, input={**section, "system": "alpha " * context})
    assert plan(tmp_path, chat_checkpoint, input=section).rows == 200
    for name in "ab":
        texts = pa.array([f"caf\xe9 {row}".encode("latin-1") for row in range(100)]).view(pa.string())
        pq.write_table(pa.table({"p": texts}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="UTF-8"):
        plan(tmp_path, chat_checkpoint, input=section)


def test_only_the_first_rows_are_read(tmp_path: Path, checkpoint: Path) -> None:
    """A row group of many pages: what lies behind the first is damaged, and nobody notices."""
    path = tmp_path / "a.parquet"
    questions = [f"{row} " + "x" * 500 for row in range(4000)]
    pq.write_table(pa.table({"q": questions}), path, compression="none", use_dictionary=False, data_page_size=4096)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20_000] = b"\xff" * 20_000
    path.write_bytes(bytes(data))
    with pytest.raises((OSError, pa.ArrowException)):
        pq.read_table(path)
    assert (
        plan(tmp_path, checkpoint, input={"template": RULES + " {{ q | truncate(9) }}"}, shard_rows=4000).rows == 4000
    )


class IsolatedPlanning(InProcess):
    """Plans as `skipdecode run` does."""

    call_isolated = RayData.call_isolated  # type: ignore[assignment]


def test_a_sampled_row_that_kills_its_process_costs_the_check_and_not_the_driver(
    inputs: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad: dict[str, Any] = {"input": {"template": "{{ 1 + n }}"}}
    with pytest.raises(UserError, match="none of 32 sampled rows can be answered"):
        plan(inputs, checkpoint, hardware=IsolatedPlanning(), **bad)
    monkeypatch.setattr(sample, "row_errors", poison_stages.deadly_row_errors)
    assert plan(inputs, checkpoint, hardware=IsolatedPlanning(), **bad).rows == 200
    assert "the process that prepared the sampled rows died (killed by SIGKILL)" in caplog.text


def test_texts_that_surely_fit_are_not_prepared(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"p": [None] * 40 + ["name[a]"] + [None] * 40}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"p": ["name[a]", *[None] * 40]}), tmp_path / "b.parquet")
    monkeypatch.setattr(sample, "row_errors", lambda *_: pytest.fail("prepared"))
    assert plan(tmp_path, checkpoint, input={"prompt": "p", "template": None}).rows == 122
