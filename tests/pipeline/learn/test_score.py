"""Scoring of several speeds, and the command `evaluate`: measurements, order of timed runs, and refusals."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from new_model import train_tokenizer
from typer.testing import CliRunner, Result

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.scheduler import plan_batches
from actors.engine.types import EngineStats
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.learn.evaluate import evaluate
from pipeline.learn.rows import draw
from pipeline.learn.score import run as run_module
from pipeline.learn.score.lines import Evaluation, Line, Score, print_tables
from pipeline.learn.score.metrics import EXACT
from pipeline.learn.score.run import REFERENCE
from pipeline.learn.score.timing import TimedRun, common_batch, time_in_turn
from pipeline.learn.speeds import Variant, variants
from pipeline.runtime.wide_console import wide_console

ROWS = [f"alpha bravo {word}" for word in ("charlie", "delta", "echo", "golf")]


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """Four rows with references."""
    table = {
        "prompt": ROWS,
        "references": [[row, "x y"] for row in ROWS],
        "label": ["red", "green", "red", "Blue "],
        "some": [["a"], [], ["b"], None],
        "long": ["a", "b", "word " * 99, "d"],
    }
    pq.write_table(pa.table(table), tmp_path / "eval.parquet")
    return {
        "input": {"path": str(tmp_path / "eval.parquet")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_new_tokens": 12},
        "actors": {"threads": 1},
        "adapt": {"speedups": [1, 2], "references": "references", "runs": 1},
    }


def run(job: dict[str, Any], tmp_path: Path, *options: str) -> Result:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return CliRunner().invoke(app, ["evaluate", str(tmp_path / "job.yaml"), *options])


def scored(job: dict[str, Any], *speedups: float, others: dict[str, Path] | None = None, **adapt: Any) -> Evaluation:
    return evaluate(JobConfig.model_validate({**job, "adapt": {**job["adapt"], **adapt}}), speedups, others)


def test_quality_and_the_three_speeds(job: dict[str, Any], tmp_path: Path) -> None:
    result = run(job, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    one, two = found["lines"]
    assert (one["name"], one["nominal"], one["layer_ratio"], one["wall_clock"]) == ("1x", 1, 1, None)
    assert all(0 < line["timed_seconds"] < 10 and line["wall_clock"] is None for line in (one, two))  # too short
    assert (found["rows"], found["batch"], found["metric"]) == (4, 64, "bleu")
    assert two["layer_ratio"] > 1.4
    assert two["cache_bytes"] < one["cache_bytes"]
    for line in (one, two):
        assert set(line["scores"]) == {"bleu", "rouge_l", "exact_match", "agreement_exact", "fidelity", "token_kl"}
        for score in line["scores"].values():
            assert score["low"] <= score["high"] and score["loss_low"] <= score["loss_high"]
    values = {name: score["value"] for name, score in one["scores"].items()}
    assert (values["agreement_exact"], values["token_kl"]) == (100, 0)
    assert two["scores"]["token_kl"]["value"] > 0
    assert all(len(text) <= 120 for text in result.stderr.splitlines())
    assert "BLEU" in result.stderr and "token KL nats" in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out-adapt").exists()


def test_every_stage_is_announced(job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runtime.announce.INTERVAL", 0.0)
    result = run({**job, "adapt": {**job["adapt"], "runs": 2}, "actors": {"max_batch": 2}}, tmp_path)
    assert result.exit_code == 0, result.output
    rounds = [f"{name}, round {number} of 2" for number in (1, 2) for name in ("1x", "2x")]
    stages = [f"loading {job['model']['path']}, for 4 rows"]
    stages += [f"answering 4 rows at {one}" for one in rounds] + ["scoring 2 lines of 4 answers"]
    lines = result.stderr.splitlines()
    assert [line for line in lines if line in stages] == stages and f"{rounds[-1]}: 2 of 4 rows" in lines


def test_without_references_lines_are_judged_by_full_depth(job: dict[str, Any]) -> None:
    """Each speed is shown once, full depth always."""
    found = scored(job, 3, 2, 3, references=None)
    assert [line.name for line in found.lines] == ["1x", "2x", "3x"]
    assert found.metric == "fidelity"
    assert found.chance["fidelity"].value < found.lines[0].scores["fidelity"].value
    assert set(found.lines[0].scores) == {"agreement_exact", "token_kl", "fidelity"}
    own, three = (found.lines[number].scores["fidelity"] for number in (0, 2))
    assert own.loss == 0 < three.loss
    brief = {**job, "sampling": {"max_new_tokens": 8}}
    assert scored(brief, references=None).metric == "agreement_exact"


def test_choices_are_scored_by_exact_match(job: dict[str, Any]) -> None:
    job["choices"] = ["red", "green", "blue"]
    found = scored({**job, "sampling": {}}, references="label")
    assert (found.metric, found.batch) == ("exact_match", 64)
    assert "bleu" not in found.lines[0].scores and "fidelity" not in found.lines[0].scores
    right = [("red", "green", "red", "blue")[row] for row in draw(4, 4)]
    given = [answer.generated_text for answer in found.answers["1x"]]
    assert set(given) <= set(job["choices"])
    hits = sum(one == label for one, label in zip(given, right, strict=True))
    assert found.lines[0].scores["exact_match"].value == 25 * hits
    assert found.chance["agreement_exact"].value == 25 * max(map(given.count, given))
    assert "token_kl" not in found.chance


def test_speeds_come_from_the_option_the_section_or_the_job(job: dict[str, Any]) -> None:
    assert [line.name for line in scored(job).lines] == ["1x", "2x"]
    alone = {key: value for key, value in job.items() if key != "adapt"}
    alone["schedule"] = {"speedup": 1.5}
    assert [line.name for line in evaluate(JobConfig.model_validate(alone)).lines] == ["1x", "1.5x"]
    assert [line.name for line in evaluate(JobConfig.model_validate(alone), [2]).lines] == ["1x", "2x"]


def test_bad_speeds_and_too_few_rows_are_one_line(job: dict[str, Any], tmp_path: Path) -> None:
    for options, words in ((("--speedups", "1;2"), "--speedups"), (("--speedups", "0.5"), "speedup = 0.5")):
        result = run(job, tmp_path, *options)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and words in result.stderr
    table = pq.read_table(tmp_path / "eval.parquet").slice(0, 1)
    pq.write_table(table, tmp_path / "eval.parquet")
    result = run(job, tmp_path)
    assert (result.exit_code, "1 row to score" in result.stderr) == (2, True)


def test_rows_that_cannot_be_scored_are_left_out_with_a_warning(
    job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert scored(job, references="some").rows == 2
    job["input"]["prompt"] = "long"
    assert scored(job).rows == 3
    assert [text.partition(":")[0] for text in caplog.messages if "left out" in text] == [
        "2 of 4 rows are left out",
        "1 of 4 rows are left out",
    ]


def test_a_chat_template_writes_the_date_of_today(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = shutil.copytree(job["model"]["path"], tmp_path / "chat"), list[Prompt]()
    date = "{{ 'echo' if strftime_now('%Y') > '2000' else 'delta' }}"  # the tokenizer knows no digits
    template = date + "{% for one in messages %} {{ one.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("pipeline.learn.evaluate.score", lambda *given, **_: asked.extend(given[3]))
    scored({**job, "input": {**job["input"], "chat": True}, "model": {"path": str(folder), "dtype": "float32"}})
    texts = [load_tokenizer(folder).decode(one.ids).strip() for one in asked]
    assert len(texts) == 4 and all(text.startswith("echo alpha") for text in texts), texts


def test_speeds_keep_what_the_checkpoint_says() -> None:
    spec = ScheduleSpec(depths=(9, 8), horizon=7, decay="step", keep_order="even", prompt="first")
    one, two = variants(spec, [1, 2.5])
    assert (one.name, one.nominal) == ("1x", 1)
    assert two.name == "2.5x" and two.spec == ScheduleSpec(
        speedup=2.5, horizon=7, decay="step", keep_order="even", prompt="first"
    )
    assert one.spec.build(12).depths == (12,)


def test_a_variant_has_a_name_and_equal_ones_are_left_out() -> None:
    further = ({"prompt": "first"}, {"prompt": "first", "decay": "constant"})
    found = variants(ScheduleSpec(horizon=5), [1, 2], further)
    assert [one.name for one in found] == ["1x", "2x", "2x prompt=first", "2x uniform"]
    assert [one.is_uniform for one in found] == [False, False, False, True]
    constant = variants(ScheduleSpec(prompt="first", decay="constant"), [1, 2], further)
    assert [(one.name, one.is_uniform) for one in constant] == [("1x", False), ("2x", True)]


def test_lines_are_compared_with_a_reference_model(job: dict[str, Any], tmp_path: Path, checkpoint: Path) -> None:
    """With the same weights, stored twice, scores are those without it, but for rounding; and another model's too."""
    alone = scored(job)
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "skipdecode.json").unlink()
    found = scored(job, others={REFERENCE: tmp_path / "copy", "a twin": tmp_path / "copy"})
    assert [line.name for line in found.lines] == ["reference model", "1x", "2x", "a twin"]
    assert found.full_depth == "reference model"
    shown = io.StringIO()
    print_tables(wide_console(shown), found)
    assert {line.split("  ")[0] for line in shown.getvalue().splitlines()} >= {line.name for line in found.lines}
    for line, own in zip(found.lines[1:], [*alone.lines, alone.lines[0]], strict=True):
        assert line.scores.keys() == own.scores.keys()
        for metric, score in line.scores.items():
            if metric in EXACT and own is alone.lines[0]:  # four rows that agree do not show that all would
                assert score.loss_high == pytest.approx(100 * (1 - 0.05 ** (1 / 4)))
                score = replace(score, loss_high=0.0)
            assert astuple(score) == pytest.approx(astuple(own.scores[metric]), rel=1e-4, abs=1e-4)
    assert [found.lines[number].nominal for number in (0, 1, 3)] == [None, 1, None]
    # layers of another model are no measure of ours, and so no ratio
    assert [(found.lines[number].layer_ratio, found.lines[number].mean_depth) for number in (0, 3)] == [(None, 4)] * 2
    train_tokenizer(["quite other words"], vocab_size=290).save_pretrained(tmp_path / "copy")
    with pytest.raises(UserError, match=r"^a twin: .*copy has another tokenizer than"):
        scored(job, others={"a twin": tmp_path / "copy"})


def test_without_decode_steps_there_is_no_depth(job: dict[str, Any], tmp_path: Path) -> None:
    job["sampling"]["max_new_tokens"] = 1
    result = run(job, tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search(r"^1x +- +- +- +- +0 ", result.output, re.MULTILINE)


def test_a_warning_shows_the_whole_text_of_equal_answers() -> None:
    answers: list[Any] = [SimpleNamespace(generated_text="no; yes")] * 8
    done = TimedRun(answers, EngineStats(), [1.0], [1.0])
    line = run_module._line(Variant("2x", ScheduleSpec(), 2.0), done, done, {})
    assert line.warnings == ("8 of 8 answers (100.0%) are the same: 'no; yes'",)


@pytest.mark.parametrize(
    ("base", "seconds", "decode", "ratios"),
    [
        ([9.0, 8.0], [4.0, 8.0], [2.0, 4.0], (8.5 / 6, None)),  # the rounds count together
        ([9.0, 0.9], [4.0, 8.0], [4.0, 8.0], (None, None)),
        ([9.0, 8.0], [4.0, 5.0], [2.0, 4.0], (None, None)),
        ([9.0, 8.0], [4.0, 8.0], [3.0, 8.0], (8.5 / 6, 8.5 / 5.5)),
    ],
)
def test_a_ratio_of_times_rests_on_ten_seconds_a_side(
    base: list[float], seconds: list[float], decode: list[float], ratios: tuple[float | None, float | None]
) -> None:
    full, run = TimedRun([], EngineStats(generated_tokens=1), base, base), TimedRun([], EngineStats(), seconds, decode)
    line = run_module._line(Variant("2x", ScheduleSpec(), 2.0), run, full, {})
    assert (line.wall_clock, line.decode_wall_clock, line.timed_seconds) == (*ratios, sum(seconds))


def test_brackets_in_names_and_answers_are_printed_as_they_are() -> None:
    line = Line("model [b]", None, "full", None, 1.0, {"fidelity": Score(1, 0, 0)}, warnings=("'[/INST]'",))
    out = io.StringIO()
    print_tables(wide_console(out), Evaluation([line], {"model [b]": []}, 64, "fidelity", "model [b]", {}))
    assert "model [b]: '[/INST]'" in out.getvalue() and "\nmodel [b]  " in out.getvalue()


def test_batches_are_those_that_fit_at_full_depth(job: dict[str, Any]) -> None:
    """Skipping layers saves cache; the rows are cut alike all the same."""
    job["actors"] = {"threads": 1, "cache_bytes": 40_000}
    assert 1 <= scored(job).batch < 4
    job["actors"]["cache_bytes"] = 1000
    with pytest.raises(UserError, match=r"eval.parquet: row \d: needs \d+ bytes .* actors.cache_bytes is 1000"):
        scored(job)


PROMPTS = [Prompt([1] * length, "f", row) for row, length in enumerate((3, 9, 5, 9, 1))]


@pytest.mark.parametrize(
    ("rounds", "device", "warm_ups"), [(1, "cpu", 2), (2, "cpu", 5), (1, "cuda", 5), (2, "cuda", 5)]
)
def test_lines_warm_up_and_take_turns(rounds: int, device: str, warm_ups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a warm-up of few rows, these are the longest: the batch that comes first and needs the most."""
    asked: list[tuple[str, list[int]]] = []

    def answer(generator: Any, schedule: Any, prompts: list[Prompt], stage: str = "") -> TimedRun:
        asked.append((schedule, [one.row for one in prompts]))
        number: Any = len(asked)
        return TimedRun([number], number, [number], [number / 2])

    monkeypatch.setattr("pipeline.learn.score.timing.answer", answer)
    generator = SimpleNamespace(settings=SimpleNamespace(max_batch=2), device=SimpleNamespace(type=device))
    lines: Any = {"1x": (generator, "1x"), "2x": (generator, "2x")}
    runs = time_in_turn(lines, PROMPTS, rounds)
    assert [name for name, _ in asked] == ["1x", "2x"] * (rounds + 1)
    assert [len(rows) for _, rows in asked] == [warm_ups] * 2 + [5] * (2 * rounds)
    if warm_ups == 2:
        assert asked[0][1] == asked[1][1] == [1, 3]
    assert runs["1x"].seconds == [2 * (1 + one) + 1 for one in range(rounds)]
    assert runs["2x"].decode_seconds == [2 + one for one in range(rounds)]
    last: Any = 2 * (rounds + 1)
    assert (runs["2x"].answers, runs["2x"].stats) == ([last], last)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 300), st.integers(1, 8)
)
@settings(max_examples=200)
def test_every_full_batch_fits_the_budget(lengths: list[int], new: int, budget: int, most: int) -> None:
    """A row of a short prompt may have the room that the longest one's lacks, and both may share a batch."""
    context = 32

    def row_bytes(prompt: int, answer: int) -> int:
        return prompt + answer - 1 if answer > 1 else 0  # as no decode step reads it

    limits = [min(new, context - length) for length in lengths]
    engine = SimpleNamespace(row_bytes=row_bytes, decoder=SimpleNamespace(context_length=context))
    generator: Any = SimpleNamespace(engine=engine, settings=SimpleNamespace(cache_bytes=budget, max_batch=most))
    prompts = [Prompt([1] * length, "f", row) for row, length in enumerate(lengths)]
    if max(map(row_bytes, lengths, limits)) > budget:
        with pytest.raises(ValueError, match=r"f: row \d+: needs \d+ bytes of cache at full depth"):
            common_batch(generator, prompts, new)
        return
    batch = common_batch(generator, prompts, new)
    assert 1 <= batch <= most
    cut = plan_batches(lengths, limits, row_bytes=row_bytes, budget_bytes=budget, max_rows=batch)
    assert len(cut) == math.ceil(len(lengths) / batch)  # by their number alone, as any schedule cuts them
    assert common_batch(generator, prompts[::-1], new) == batch
