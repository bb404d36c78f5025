"""A new job at a schedule below full depth measures its agreement first, and stops where the answers are ruined."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import InProcess, job_values, run_in_process

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator
from pipeline import job as jobs
from pipeline import nightly
from pipeline.config.job import JobConfig
from pipeline.generate import agreement as agreements
from pipeline.generate.agreement import Agreement, chance_of, measure_agreement, skipped_share
from pipeline.input.shards import spread_rows
from pipeline.plan import agreement as plans
from pipeline.plan import plan_files
from pipeline.planned import PlannedJob, generator_arguments
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.report.summary import print_result
from pipeline.runtime.isolated import Died
from pipeline.runtime.wide_console import wide_console
from pipeline.storage.folder import open_folder

ROWS = 20
WORDS = ["alpha", "bravo cheap", "the river", "Zizzi is"]


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    (tmp_path / "in").mkdir()
    prompts = [f"{WORDS[row % 4]} {row}" if row != 7 else None for row in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in" / "a.parquet", row_group_size=8)
    schedule, sampling = {"agreement_rows": 16, "min_agreement": 0.0}, {"max_new_tokens": 12, "temperature": 1.0}
    model = {"cache": str(tmp_path / "cache")}
    return job_values(tmp_path / "in", tmp_path / "out", checkpoint, schedule=schedule, sampling=sampling, model=model)


def job(values: dict[str, Any], **sections: Any) -> JobConfig:
    merged = {**values}
    for name, section in sections.items():
        merged[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return JobConfig.model_validate(merged)


def plan(config: JobConfig) -> PlannedJob:
    return jobs.plan(config, None, InProcess())


def measured(config: JobConfig, rows: int = 16, **schedule: Any) -> Agreement:
    """As `with_agreement` measures it."""
    planned = plan(config)
    if schedule:
        planned = replace(planned, schedule=ScheduleSpec(**schedule).build(planned.schedule.num_layers))
    manifest, spec = planned.manifest, prompt_spec(config, planned.checkpoint, time.time())
    sample = spread_rows(manifest.files, manifest.shards, rows)
    arguments = generator_arguments(planned)
    return measure_agreement(sample, manifest.files, manifest.schema, config.storage, spec, arguments)


def no_measurement(*_: Any) -> Agreement:
    pytest.fail("measured again")


def test_a_ruined_job_stops_before_it_claims_its_output(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ruined = job(values, schedule={"min_agreement": 0.6})
    with pytest.raises(
        UserError, match=r"too little agreement with full depth: 0\.\d\d of \d+ tokens .* token KL .* over 15 rows"
    ) as caught:
        run_in_process(ruined)
    line = str(caught.value)
    assert "\n" not in line and "below schedule.min_agreement = 0.6" in line and "`skipdecode adapt JOB`" in line
    with pytest.raises(UserError, match="over 15 rows, measured in an earlier run, below"):
        run_in_process(ruined)
    assert not (tmp_path / "out" / "_job" / "job.json").exists()
    full = run_in_process(job(values, schedule={"speedup": 1.0}))  # another job, in the same folder
    assert full.fresh_rows == ROWS and full.manifest.agreement is None
    assert "agreement" not in capsys.readouterr().err


def test_it_is_printed_and_kept_and_measured_once(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(values)
    result = run_in_process(config)
    found = result.manifest.agreement
    assert found is not None and found.rows == 15 and found.share is not None and 0 < found.share < 0.6
    assert found.decode_ratio is not None and found.decode_ratio > 0
    assert f"agreement: {found}\n" in capsys.readouterr().err
    stored = plan_files.load(open_folder(str(tmp_path / "out"), config.storage))
    assert stored is not None and stored.agreement == found
    console = wide_console(io.StringIO())
    print_result(console, open_folder(str(tmp_path / "out"), config.storage), result, 3, config.storage)
    printed = console.file.getvalue()
    assert printed.count("  full depth's answer: ") == printed.count("  prompt: ") == 3
    assert [f"\n[a.parquet:{example.row}]\n" in printed for example in found.examples[:4]] == [True, True, True, False]
    monkeypatch.setattr(plans, "measure_agreement", no_measurement)
    (tmp_path / "out" / "part-000000.parquet").unlink()
    assert run_in_process(config).manifest.agreement == found  # resumed
    elsewhere = job(values, output={"path": str(tmp_path / "other")})
    assert run_in_process(elsewhere).manifest.agreement == found
    assert "over 15 rows, measured in an earlier run\n" in capsys.readouterr().err
    third, file = job(values, output={"path": str(tmp_path / "third")}), tmp_path / "in" / "a.parquet"
    written = file.stat().st_mtime_ns
    os.utime(file, ns=(written, written + 1))  # replaced: it may hold other rows
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run_in_process(third)
    os.utime(file, ns=(written, written))
    for record in (tmp_path / "cache" / "agreement").iterdir():
        record.write_text("{")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run_in_process(third)


def test_the_figures_are_those_of_the_full_depth_answers(values: dict[str, Any], checkpoint: Path) -> None:
    config = job(values)
    found = measured(config, ROWS)
    tokenizer = tokenizer_of(str(checkpoint))
    texts = [f"{WORDS[row % 4]} {row}" for row in range(ROWS) if row != 7]
    full = Generator(str(checkpoint), schedule={"speedup": 1}, sampling={"max_new_tokens": 12}, dtype="float32")
    answers = full.answer([Prompt(tokenizer(text)["input_ids"], "a", 0) for text in texts])
    lengths = [answer.generated_tokens for answer in answers if answer.generated_tokens > 1]
    texts_of = {example.row: example.text for example in found.examples}
    given = [row for row in range(ROWS) if row != 7]
    assert texts_of == {
        row: answer.generated_text for row, answer in zip(given, answers, strict=True) if answer.generated_tokens > 1
    }
    assert (found.rows, found.compared) == (len(lengths), sum(lengths) - len(lengths))
    assert found.answer_tokens == pytest.approx(sum(lengths) / len(lengths)) and found.token_kl > 0.1
    fast = Generator(str(checkpoint), sampling={"max_new_tokens": 12}, dtype="float32")
    prompts = [Prompt(tokenizer(text)["input_ids"], "a", 0) for text in texts]
    both = zip(fast.answer(prompts), answers, strict=True)  # greedy, they share the first token
    assert found.agreed >= sum((one.token_ids or ())[1:2] == (other.token_ids or ())[1:2] for one, other in both)


def test_a_schedule_of_all_layers_agrees_in_every_token(values: dict[str, Any]) -> None:
    found = measured(job(values), speedup=1.0)
    assert found.share == 1 and found.token_kl == pytest.approx(0, abs=1e-6) and found.skipped == 0


def test_labels_are_compared_whole(values: dict[str, Any]) -> None:
    config = job(values, choices=["the river Thames", "the river Cam", "cheap"])
    found = measured(config)
    assert found.labels and found.compared == found.rows <= 16 and 0 <= found.agreed <= found.rows
    assert found.by_chance is not None and found.rows / 3 <= found.by_chance <= found.rows
    assert measured(config, speedup=1.0).share == 1


def test_a_schedule_at_or_below_chance_is_called_useless() -> None:
    agreement = Agreement(rows=9, labels=True, compared=9, agreed=6, by_chance=6, kappa=0.0)
    assert "0.67 of 9 labels as at full depth (chance: 0.67), Cohen's kappa 0.00" in str(agreement)
    assert str(agreement).endswith("; at or below chance: useless")
    for other in ({"agreed": 7}, {"agreed": 9, "by_chance": 9}, {"by_chance": None}):  # one label says nothing
        assert "useless" not in str(replace(agreement, **other))
    assert chance_of([("a", "a"), ("a", "b"), ("b", "b"), ("a", "a")]) == (3, pytest.approx(0.5))


@pytest.mark.parametrize(
    "change",
    [{"sampling": {"max_new_tokens": 1}}, {"choices": ["alpha", "cheap", "river"]}],
    ids=["one token", "labels"],
)
def test_a_schedule_that_cannot_gain_is_said_to(
    values: dict[str, Any], change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(values, **change)
    result = run_in_process(config)
    line = "this schedule cannot make the job faster: every answer has one token"
    assert line in capsys.readouterr().err and result.manifest.agreement is None
    assert result.totals.layer_steps == result.totals.full_layer_steps == 0
    skipping = job(values, schedule={"prompt": "first", "agreement_rows": 2}, **change)
    first = plan(skipping)
    assert plans.can_gain(first.schedule, prompt_spec(skipping, first.checkpoint, 0.0))
    assert measured(skipping).compared > 0


def test_prompts_that_dominate_are_said_to(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a " * 20] * 3
    pq.write_table(pa.table({"prompt": prompts}), Path(values["input"]["path"]) / "a.parquet")
    run_in_process(job(values, sampling={"max_new_tokens": 3}, shared_prefix=False))
    assert "this schedule can gain little: with prompts of " in capsys.readouterr().err
    schedule = ScheduleSpec(depths=(2,)).build(4)
    assert skipped_share(schedule, 90, [11]) == pytest.approx(0.05)
    assert skipped_share(replace(schedule, prompt="first"), 90, [11]) == 0.5


def test_rows_that_fail_are_passed_over_and_a_death_does_not_stop_the_job(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Agreement:
        raise Died("killed by SIGKILL")

    monkeypatch.setattr(InProcess, "call_as_actors", dies)
    assert run_in_process(job(values)).fresh_rows == ROWS
    assert "agreement with full depth is not measured: the process died (killed by SIGKILL)" in caplog.text
    monkeypatch.undo()
    pq.write_table(pa.table({"prompt": pa.array([None, ""], pa.string())}), tmp_path / "in" / "a.parquet")
    broken = job(values, output={"path": str(tmp_path / "broken")}, schedule={"min_agreement": 0.9})
    assert run_in_process(broken).totals.errors == 2


def test_a_run_over_a_growing_table_measures_before_it_claims_files(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = job(values, input={"since": "last_success"}, schedule={"min_agreement": 1.0})
    with pytest.raises(UserError, match="too little agreement with full depth"):
        nightly.run(growing, backend=InProcess())
    assert not list((tmp_path / "out").rglob("*.parquet"))
    growing = job(values, input={"since": "last_success"})
    assert len(nightly.run(growing, backend=InProcess()).finished) == 1
    monkeypatch.setattr(plans, "measure_agreement", no_measurement)
    pq.write_table(pa.table({"prompt": ["more"]}), tmp_path / "in" / "b.parquet")
    [second] = nightly.run(growing, backend=InProcess()).finished
    assert second.result.fresh_rows == 1


def test_long_answers_are_cut_off(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "MOST_TOKENS", 4)
    found = measured(job(values, sampling={"min_new_tokens": 10, "ignore_eos": True}))
    assert (found.answer_tokens, found.compared, found.skipped) == (4, 3 * found.rows, None)
