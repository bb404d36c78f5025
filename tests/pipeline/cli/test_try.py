"""`skipdecode try`: rows, answers and row errors on the screen; nothing written; no Ray."""

from __future__ import annotations

import datetime
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from in_process import invoke, job_values, run_in_process
from random_adapter import random_adapter

from actors.answers import Answer, error_answer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.advise.try_rows import answer_first_rows, same_tokens
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.report.summary import print_result
from pipeline.runtime.wide_console import wide_console
from pipeline.storage.folder import open_folder


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """Two files of three rows; the second row is null."""
    (tmp_path / "in").mkdir()
    for number, prompts in enumerate((["alpha", None, "bravo"], ["cheap pub", "alpha bravo", "food"])):
        table = pa.table({"id": [f"{number}-{row}" for row in range(3)], "prompt": pa.array(prompts, pa.string())})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    sampling = {"temperature": 1.0, "seed": 5}
    return job_values(tmp_path / "in", tmp_path / "out", checkpoint, input={"id": "id"}, sampling=sampling)


def tried(folder: Path, values: dict[str, Any], *options: str) -> Result:
    return invoke(folder, values, *options, command="try")


def tree(folder: Path) -> list[tuple[str, int]]:
    """All files and folders but the job's file."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.name != "job.yaml")


def test_prompts_answers_and_row_errors_are_printed_and_nothing_is_written(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    before = tree(tmp_path)
    result = tried(tmp_path, values, "--rows", "4")
    assert result.exit_code == 0, result.output
    assert tree(tmp_path) == before
    shown = [block.splitlines() for block in result.stdout.strip().split("\n\n")[1:]]
    assert [block[0] for block in shown[:-1]] == ["[0-0]", "[0-1]", "[0-2]", "[1-0]"]
    assert shown[0][1].startswith("  prompt: <s>") and shown[0][1].endswith("<sep>")  # special tokens are shown
    assert "alpha" in shown[0][1] and shown[0][2].startswith("  answer")
    assert sum(line.startswith("  full depth's answer: ") for line in shown[0]) == 1  # answers may hold line breaks
    assert shown[0][-1].endswith("% of the tokens are the same)")
    assert re.fullmatch(r"the same tokens as at full depth: \d+ of \d+ \(\d+\.\d%\)", shown[4][0])
    assert shown[1][1:] == ["  error: prompt is null"]


def test_if_no_row_has_an_answer_the_exit_status_is_3(tmp_path: Path, values: dict[str, Any]) -> None:
    result = tried(tmp_path, values, "--set", "input.template={{ 1 + prompt }}", "--rows", "2")
    assert result.exit_code == 3 and result.stderr.endswith("skipdecode: none of 2 rows has an answer\n")


def test_its_answers_are_those_of_the_job(values: dict[str, Any], tmp_path: Path) -> None:
    config = JobConfig.model_validate(values)
    tried = answer_first_rows(config, 6)
    run_in_process(config)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [row.id for row in tried] == [row["id"] for row in rows]
    for row, answered in zip(tried, rows, strict=True):
        assert [answer.generated_text for answer in row.answers] == [answered["generated_text"]]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_answers_at_full_depth_are_those_of_the_job_at_1x(
    values: dict[str, Any], tmp_path: Path, checkpoint: Path, adapted: bool
) -> None:
    """A speed adapter is merged into the weights, but not into those of full depth."""
    whole = JobConfig.model_validate(values | {"schedule": {"speedup": 1}})
    run_in_process(whole)
    if adapted:
        spec = ScheduleSpec(speedup=2, horizon=3)
        values["model"]["speed_adapter"] = str(random_adapter(checkpoint, tmp_path / "adapter", spec))
    tried = answer_first_rows(JobConfig.model_validate(values), 6)
    at_full_depth = [answer.generated_text for row in tried for answer in row.full_depth]
    assert at_full_depth == pq.read_table(tmp_path / "out")["generated_text"].to_pylist()
    assert at_full_depth != [answer.generated_text for row in tried for answer in row.answers]
    assert not any(row.full_depth for row in answer_first_rows(whole, 6))


def test_tokens_are_the_same_if_both_answers_have_them_in_one_order() -> None:
    def answer(*tokens: int) -> Answer:
        return replace(error_answer(0, 1, ""), token_ids=list(tokens), error=None)

    for one, other, same in (((1, 2, 3), (1, 9, 2, 3), 3), ((1, 2), (2, 1), 1), ((1,), (2,), 0), ((5, 5), (5, 5), 2)):
        assert same_tokens(answer(*one), answer(*other)) == same


@pytest.mark.parametrize(
    "change",
    [{"sampling": {"max_new_tokens": 1}}, {"choices": ["alpha", "cheap", "river"]}],
    ids=["one token", "labels"],
)
def test_a_schedule_that_cannot_gain_is_said_to(
    values: dict[str, Any], change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = JobConfig.model_validate(values | change)
    tried = answer_first_rows(config, 6)
    line = "this schedule cannot make the job faster: every answer has one token"
    assert line in capsys.readouterr().err and not any(row.full_depth for row in tried)
    totals = run_in_process(config).totals
    assert line in capsys.readouterr().err and totals.layer_steps == totals.full_layer_steps == 0
    skipping = JobConfig.model_validate(values | change | {"schedule": {"prompt": "first", "unadapted": True}})
    assert all(row.full_depth for row in answer_first_rows(skipping, 6))
    assert line not in capsys.readouterr().err


def test_an_id_that_python_cannot_hold_is_a_question_mark(values: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([20_000, 2**31 - 1], pa.date32()), "prompt": ["alpha", "beta"]})
    pq.write_table(table, tmp_path / "dates.parquet")
    config = JobConfig.model_validate({**values, "input": {"path": str(tmp_path / "dates.parquet"), "id": "id"}})
    assert [row.id for row in answer_first_rows(config, 2)] == [datetime.date(2024, 10, 4), "?"]


def test_keys_can_be_set_and_a_mistake_is_one_line(tmp_path: Path, values: dict[str, Any]) -> None:
    result = tried(tmp_path, values, "--rows", "1", "--set", "sampling.n=2")
    assert result.exit_code == 0 and "  answer 0: " in result.stdout and "  answer 1: " in result.stdout
    assert "  full depth's answer 0: " in result.stdout and "  full depth's answer 1: " in result.stdout
    result = tried(tmp_path, values, "--set", "input.prompt=nothing")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "nothing" in result.stderr


def test_a_job_for_gpus_is_not_tried_on_a_cpu_unasked(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    values["actors"] = {"gpus": 1}
    result = tried(tmp_path, values)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "actors.gpus: torch finds no GPU here; to try the job on the CPU, add --set actors.gpus=0" in result.stderr


def test_control_tokens_that_a_prompt_column_spells_are_counted_in_try_and_at_the_end_of_the_job(
    tmp_path: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"id": ["a", "b"], "prompt": ["alpha<pad>bravo<sep>", "food :m: [b]"]})
    pq.write_table(table, tmp_path / "in" / "0.parquet")
    said = "parsed 2 control tokens in prompts; set input.special_tokens: text to keep them as text"
    result = tried(tmp_path, values)
    assert result.exit_code == 0 and said in result.stdout
    result = tried(tmp_path, values, "--set", "input.special_tokens=text")
    assert result.exit_code == 0 and "control token" not in result.stdout
    done = run_in_process(JobConfig.model_validate(values))
    assert done.totals.control_tokens == 2
    print_result(wide_console(), open_folder(str(tmp_path / "out"), StorageConfig()), done, 2, StorageConfig())
    shown = capsys.readouterr().out
    assert said in shown and "\n[a]\n  prompt: <s> alpha<pad> bravo<sep><sep>\n  answer: " in shown
    assert "food :m: [b]" in shown  # neither an emoji nor markup


def test_end_tokens_and_settings_that_are_not_followed_are_named(
    tmp_path: Path, checkpoint: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "suppress_tokens": [5], "top_k": 20}')
    values["model"]["path"] = str(model)
    stops = ["--set", "sampling.stop=[pub]", "--set", "sampling.stop_token_ids=[3]"]
    caplog.set_level("INFO", "pipeline.prepare.prompt_spec")
    result = tried(tmp_path, values, "--rows", "1", *stops)
    assert result.exit_code == 0, result.output
    own = "'<sep>' (sampling.stop_token_ids), 'pub' (sampling.stop)"
    named = f"'<pad>' (generation_config.json), '</s>' (config.json, the tokenizer), {own}"
    assert f"answers end at {named}" in result.stdout
    assert "generation_config.json (see `sampling`): suppress_tokens: [5], top_k: 20" in caplog.text
    said = " ".join(one.getMessage() for one in caplog.records if one.name.startswith("pipeline"))
    assert "top_k" not in said.replace("top_k: 20", "")
    (model / "generation_config.json").write_text('{"eos_token_id": 4000}')
    for command in ("try", "plan"):
        result = invoke(tmp_path, values, command=command)
        assert result.exit_code == 2 and "4000 lies outside the vocabulary" in result.stderr.strip().splitlines()[-1]


def test_answers_that_all_reach_their_limit_are_a_warning(tmp_path: Path, values: dict[str, Any]) -> None:
    table = pa.table({"id": list(map(str, range(30))), "prompt": [f"alpha {row}" for row in range(30)]})
    pq.write_table(table, tmp_path / "in" / "0.parquet")
    values["sampling"] = {"max_new_tokens": 1}
    result = tried(tmp_path, values, "--rows", "30")
    assert "30 of 30 answers (100.0%) reach the length limit" in result.stdout


def test_messages_that_end_with_the_assistants_turn_get_a_hint(
    tmp_path: Path, chat_checkpoint: Path, values: dict[str, Any]
) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    for file in (tmp_path / "in").iterdir():
        file.unlink()
    pq.write_table(pa.table({"id": ["a"], "m": [chat]}), tmp_path / "in" / "0.parquet")
    values["input"]["messages"] = "m"
    values["model"]["path"] = str(chat_checkpoint)
    said = "a chat ends with an assistant's message, but the model starts a new message; "
    assert said in tried(tmp_path, values).stdout
    result = tried(tmp_path, values, "--set", "input.continue_final=true")
    assert result.exit_code == 0 and said not in result.stdout and "[assistant]It is\n" in result.stdout
