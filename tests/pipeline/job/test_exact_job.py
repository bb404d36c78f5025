"""Jobs in exact mode, in this process: full depth's answers, what was drafted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from in_process import answered_rows, run_in_process, run_interrupted
from random_adapter import random_adapter

from actors.engine.cpu import library
from actors.engine.errors import UserError
from actors.engine.schedules.schedule import ScheduleSpec
from pipeline.config.job import JobConfig
from pipeline.report.drafting import drafting
from pipeline.report.job_page import write_report
from pipeline.storage.folder import open_folder
from pipeline.try_rows import answer_first_rows

ROWS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "in.parquet"
    prompts = [" ".join(["alpha", "bravo", "cheap"][: 1 + row % 3]) for row in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


def config(inputs: Path, output: Path, checkpoint: Path, **changes: Any) -> JobConfig:
    values: dict[str, Any] = {
        "input": {"path": str(inputs)},
        "output": {"path": str(output), "token_ids": True},
        "model": {"path": str(checkpoint), "dtype": "bfloat16"},
        "sampling": {"max_new_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True, "n": 2},
        "actors": {"threads": 1, "scheduler": "refill", "max_batch": 5},
    }
    return JobConfig.model_validate({**values, **changes})


@pytest.mark.parametrize("adapted", [False, True], ids=["own-layers", "speed-adapter"])
def test_answers_are_those_of_full_depth(inputs: Path, checkpoint: Path, tmp_path: Path, adapted: bool) -> None:
    run_in_process(config(inputs, tmp_path / "full", checkpoint, schedule={"speedup": 1.0}))
    model: dict[str, Any] = {"path": str(checkpoint), "dtype": "bfloat16"}
    if adapted:
        model["speed_adapter"] = str(random_adapter(checkpoint, tmp_path / "a", ScheduleSpec(speedup=2, horizon=3)))
    exact = config(inputs, tmp_path / "exact", checkpoint, model=model, schedule={"speedup": 2.0, "exact": True})
    result = run_in_process(exact)
    answers = answered_rows(tmp_path / "exact")
    assert answers == answered_rows(tmp_path / "full") and len(answers) == 2 * ROWS
    totals = result.totals
    assert totals.layer_ratio == 1.0 and totals.mean_depth == 4
    if library.multiplies(torch.bfloat16, torch.device("cpu")):
        assert totals.drafted_tokens > 0 and totals.verified_tokens > totals.drafted_tokens >= totals.accepted_tokens
        assert f"exact: {totals.drafted_tokens:,} tokens drafted by layers" in drafting(totals)[0]
    assert run_in_process(exact).fresh_rows == 0
    tried = answer_first_rows(exact, 2)
    assert [one.token_ids for row in tried for one in row.answers] == [row["token_ids"] for row in answers[:4]]


def test_prompt_lookup_alone_and_a_run_that_was_stopped(
    inputs: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At speedup 1, with answers that repeat themselves; the same command goes on, and the answers are the same."""
    sampling = {"max_new_tokens": 40, "repetition_penalty": 0.05, "ignore_eos": True}
    actors = {"threads": 1, "scheduler": "refill", "max_batch": 2}
    changes: dict[str, Any] = {"sampling": sampling, "actors": actors, "shard_rows": 4}
    run_in_process(config(inputs, tmp_path / "full", checkpoint, schedule={"speedup": 1.0}, **changes))
    exact = config(inputs, tmp_path / "exact", checkpoint, schedule={"speedup": 1.0, "exact": True}, **changes)
    run_interrupted(monkeypatch, exact)
    result = run_in_process(exact)
    assert 0 < result.fresh_rows < ROWS
    totals = result.totals
    assert answered_rows(tmp_path / "exact") == answered_rows(tmp_path / "full")
    assert totals.drafted_tokens == 0
    if library.multiplies(torch.bfloat16, torch.device("cpu")):
        assert totals.verified_lookup_tokens > totals.looked_up_tokens >= totals.accepted_lookup_tokens > 0
        assert f"exact: {totals.looked_up_tokens:,} tokens looked up" in drafting(totals)[0]
        write_report(open_folder(exact.output.path, exact.storage), result.manifest, exact)
        assert "tokens looked up" in (tmp_path / "exact" / "_job" / "report.html").read_text()
        stats = pq.read_table(tmp_path / "exact" / "_job" / "stats.parquet")
        assert sum(stats["looked_up_tokens"].to_pylist()) == totals.looked_up_tokens
    assert run_in_process(exact).fresh_rows == 0


def test_another_mode_is_another_job(inputs: Path, checkpoint: Path, tmp_path: Path) -> None:
    run_in_process(config(inputs, tmp_path / "out", checkpoint, schedule={"speedup": 2.0, "exact": True}))
    with pytest.raises(UserError, match="schedule"):
        run_in_process(config(inputs, tmp_path / "out", checkpoint, schedule={"speedup": 1.0}))


def test_what_exact_mode_lacks_is_refused_in_one_line(inputs: Path, checkpoint: Path, tmp_path: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        schedule = {"speedup": 2.0, "exact": True, **changes.pop("schedule", {})}
        with pytest.raises(ValueError, match=message):
            run_in_process(config(inputs, tmp_path / "out", checkpoint, schedule=schedule, **changes))

    refused("give a higher schedule.speedup", schedule={"speedup": 1.1, "horizon": 4})  # rounded, all four layers
    refused("on a GPU only layers draft", schedule={"speedup": 1.0}, actors={"gpus": 1})
    refused("on a GPU only layers draft", actors={"gpus": 1}, model={"path": str(checkpoint), "engine": "library"})
    refused("leave out model.compile", model={"path": str(checkpoint), "compile": True})
