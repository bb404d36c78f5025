"""Answers that are nearly all the same, empty or repeating are a warning with their share, wherever they are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import invoke, job_values, run_in_process

from actors.engine.errors import UserError
from pipeline.answer.answer_checks import repeats_itself, warnings_of
from pipeline.answer.coordinator import Coordinator
from pipeline.config.job import JobConfig
from pipeline.config.load import validated


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["billing"] * 7 + ["bug"] * 3, ["7 of 10 answers (70.0%) are the same: 'billing'"]),
        (["billing"] * 6 + ["bug"] * 4, []),
        (["billing"] * 4, []),  # too few
        ([f"{list(range(50))} a"] * 7 + [f"{list(range(50))} b"] * 3, ["7 of 10 answers (70.0%) are the same: '[0, 1"]),
        (["", " \n", ""] + [f"text {n}" for n in range(7)], ["3 of 10 answers (30.0%) are empty"]),
        ([""] * 2 + [f"text {n}" for n in range(8)], []),
        (
            ["so so so so so so so so so"] * 3 + [f"t {n}" for n in range(7)],
            ["3 of 10 answers (30.0%) repeat the same"],
        ),
    ],
)
def test_shares_above_the_table_are_warnings(texts: list[str], expected: list[str]) -> None:
    found = warnings_of(texts)
    assert len(found) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(found, expected, strict=True))


def test_more_than_half_at_the_length_limit_is_a_warning() -> None:
    texts = [f"text {n}" for n in range(10)]
    assert warnings_of(texts, cut_off=5) == []
    assert warnings_of(texts, cut_off=6)[0].startswith("6 of 10 answers (60.0%) reach the length limit")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I like it. I like it. I like it. I like it.", True),
        ("First, a sentence. Then, the the the the the the the the the the", True),
        ("好吃的菜好吃的菜好吃的菜好吃的菜", True),
        ("no, no, no", False),
        ("The Plough is a pub near the river that serves French food. It is a pub for families.", False),
        ('{"name": "A", "price": 1}, {"name": "B", "price": 2}, {"name": "C", "price": 3}', False),
        ("1000", False),
        ("", False),
    ],
)
def test_a_text_repeats_itself_if_half_of_its_4_grams_are_repeats(text: str, expected: bool) -> None:
    assert repeats_itself(text) is expected


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """Twenty rows with one prompt: greedy answers are the same."""
    pq.write_table(pa.table({"prompt": ["alpha bravo"] * 20}), tmp_path / "in.parquet")
    labels = {"choices": ["cheap pub", "food"], "shard_rows": 8}
    return job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **labels)


def command(values: dict[str, Any], folder: Path, *arguments: str) -> str:
    result = invoke(folder, values, *arguments[1:], command=arguments[0])
    assert result.exit_code == 0, result.output
    return result.stdout


WARNING = "20 of 20 answers (100.0%) are the same: '"


def test_one_label_for_every_row_is_said_by_try_run_and_report(
    values: dict[str, Any], tmp_path: Path, in_process: None, reports: None
) -> None:
    assert f"warning: {WARNING}" in command(values, tmp_path, "try", "--rows", "20")
    assert "warning" not in command(values, tmp_path, "try", "--rows", "19")
    assert f"warning: {WARNING}" in command(values, tmp_path, "run")
    assert f"warning: {WARNING}" in command(values, tmp_path, "report")
    assert "20 of 20 answers (100.0%) are the same" in (tmp_path / "out" / "_job" / "report.html").read_text()
    (line,) = json.loads((tmp_path / "out" / "_job" / "summary.json").read_text())["warnings"]
    assert line.startswith(WARNING)


def test_a_sign_in_the_first_shard_is_known_before_the_second_one_begins(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, known = Coordinator.begin, list[tuple[str, ...]]()

    def noted(coordinator: Coordinator, shard: int) -> bool:
        known.append(coordinator.read().warnings)
        return begin(coordinator, shard)

    monkeypatch.setattr(Coordinator, "begin", noted)
    run_in_process(JobConfig.model_validate(values))
    first, *others = known
    assert first == () and len(others) == 2
    for (line,) in others:  # of the first shard only
        assert line.startswith("8 of 8 answers (100.0%) are the same: '")


def test_plan_says_it_of_its_sample(values: dict[str, Any], tmp_path: Path, in_process: None) -> None:
    said = command(values, tmp_path, "plan", "--seconds", "5")
    assert re.search(r"warning: in the sample, \d+ of \d+ answers \(100.0%\) are the same: '", said)


def test_choices_of_one_label_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="choices: 'food' is the only label"):
        validated(JobConfig, values | {"choices": ["food"]}, "job.yaml")
