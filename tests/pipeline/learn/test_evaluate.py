"""The command `evaluate`: measurements, order of timed runs, files, and refusals before a model is loaded."""

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
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.scheduler import plan_batches
from actors.engine.types import EngineStats
from pipeline.cli.app import app
from pipeline.config.evaluate import EvalConfig
from pipeline.learn.evaluate import run as run_module
from pipeline.learn.evaluate.inputs import Variant, speeds
from pipeline.learn.evaluate.metrics import EXACT
from pipeline.learn.evaluate.results import Evaluation, Line, Score, print_tables, write_table
from pipeline.learn.evaluate.run import TimedRun, common_batch, evaluate, time_in_turn
from pipeline.runtime.wide_console import wide_console

ROWS = [f"alpha bravo {word}" for word in ("charlie", "delta", "echo", "golf")]


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """Four rows with references, at 1x and 2x."""
    table = {
        "prompt": ROWS,
        "references": [[row, "x y"] for row in ROWS],
        "label": ["red", "green", "red", "Blue "],
        "ids": [[4, 5, 6 + row] for row in range(4)],
    }
    pq.write_table(pa.table(table), tmp_path / "eval.parquet")
    return {
        "data": {"path": str(tmp_path / "eval.parquet")},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "output": str(tmp_path / "out"),
        "speedups": [1, 2],
        "sampling": {"max_new_tokens": 12},
        "threads": 1,
    }


def run(recipe: dict[str, Any], tmp_path: Path, *options: str) -> Result:
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(recipe))
    return CliRunner().invoke(app, ["evaluate", str(tmp_path / "eval.yaml"), *options])


def test_quality_and_the_three_speeds(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["data"]["limit"] = 2
    out = tmp_path / "out"
    result = run(recipe, tmp_path)
    assert result.exit_code == 0, result.output
    one, two = json.loads((out / "table.json").read_text())
    assert (one["name"], one["nominal"], one["layer_ratio"], one["wall_clock"]) == ("1x", 1, 1, None)
    assert all(0 < line["timed_seconds"] < 10 and line["wall_clock"] is None for line in (one, two))  # too short
    assert (one["rows"], one["batch"]) == (2, 64)
    assert two["layer_ratio"] > 1.4
    assert two["cache_bytes"] < one["cache_bytes"]
    for line in (one, two):
        for metric in ("bleu", "rouge_l", "exact_match", "agreement_exact", "token_kl"):
            assert line[f"{metric}_low"] <= line[f"{metric}_high"]
            assert line[f"{metric}_loss_low"] <= line[f"{metric}_loss_high"]
    assert (one["agreement_exact"], one["token_kl"]) == (100, 0)
    assert two["token_kl"] > 0
    assert pq.read_table(out / "table.parquet").to_pylist() == [one, two]
    answers = pq.read_table(out / "answers-2x.parquet")
    assert answers.num_rows == 2
    assert answers["references"].to_pylist()[0] == [ROWS[0], "x y"]
    written = {"answers-1x.parquet", "answers-2x.parquet", "evaluate.json", "table.json", "table.parquet"}
    assert {path.name for path in out.iterdir()} == written
    made_by = json.loads((out / "evaluate.json").read_text())
    asked = EvalConfig.model_validate(recipe)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"engine": "builtin"})})
    assert EvalConfig.model_validate(made_by["config"]).model_dump() == asked.model_dump()
    assert (made_by["device"].split()[0], made_by["threads"]) == ("cpu", 1) and made_by["version"] and made_by["torch"]
    assert all(len(text) <= 120 for text in result.output.splitlines())
    assert "BLEU" in result.output and "token KL nats" in result.output


def test_answers_carry_the_ids_of_the_rows(recipe: dict[str, Any], tmp_path: Path) -> None:
    answers = tmp_path / "out" / "answers-1x.parquet"
    table = pq.read_table(tmp_path / "eval.parquet")
    assert run(recipe, tmp_path).exit_code == 0
    assert pq.read_schema(answers).names == ["prompt", "references", "answer", "generated_tokens", "finish_reason"]
    pq.write_table(table.append_column("id", pa.array([7, 5, 3, 1])), tmp_path / "eval.parquet")
    assert run(recipe, tmp_path).exit_code == 0
    assert pq.read_table(answers)["id"].to_pylist() == [7, 5, 3, 1]
    recipe["data"]["id"] = "label"
    assert run(recipe, tmp_path).exit_code == 0
    assert pq.read_table(answers)["id"].to_pylist() == ["red", "green", "red", "Blue "]


def test_ids_and_prompts_of_several_types_become_text(recipe: dict[str, Any], tmp_path: Path) -> None:
    texts = {"prompt": ROWS[:2], "references": ROWS[:2], "id": ["a", None]}
    tokens = {"prompt": [[4, 5], [6]], "references": ROWS[2:], "id": pa.array([7, 2**64 - 1], pa.uint64())}
    for name, columns in (("texts", texts), ("tokens", tokens)):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    recipe["data"]["path"] = [str(tmp_path / "texts.parquet"), str(tmp_path / "tokens.parquet")]
    result = run(recipe, tmp_path)
    assert result.exit_code == 0, result.output
    answers = pq.read_table(tmp_path / "out" / "answers-1x.parquet")
    assert answers["id"].to_pylist() == ["a", None, "7", str(2**64 - 1)]
    assert answers["prompt"].to_pylist() == [*ROWS[:2], "[4, 5]", "[6]"]


def test_every_stage_is_announced(recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runtime.announce.INTERVAL", 0.0)
    result = run({**recipe, "runs": 2, "max_batch": 2}, tmp_path)
    assert result.exit_code == 0, result.output
    rounds = [f"{name}, round {number} of 2" for number in (1, 2) for name in ("1x", "2x")]
    stages = [f"loading {recipe['model']['path']}, for 4 rows"]
    stages += [f"answering 4 rows at {one}" for one in rounds] + ["scoring 2 lines of 4 answers"]
    lines = result.stderr.splitlines()
    assert [line for line in lines if line in stages] == stages and f"{rounds[-1]}: 2 of 4 rows" in lines


def test_only_files_of_the_last_evaluation_are_replaced(recipe: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run({**recipe, "speedups": [1, 3]}, tmp_path).exit_code == 0
    (out / "answers-9x.parquet").write_text("mine")
    assert run(recipe, tmp_path).exit_code == 0
    names = {path.name for path in out.iterdir()}
    assert "answers-2x.parquet" in names and "answers-3x.parquet" not in names
    result = run({**recipe, "speedups": [1, 9]}, tmp_path)
    assert result.exit_code == 2
    assert "answers-9x.parquet exists and evaluate.json does not list it; move it, or choose" in result.stderr
    assert (out / "answers-9x.parquet").read_text() == "mine"


def test_without_references_lines_are_judged_by_full_depth(recipe: dict[str, Any], tmp_path: Path) -> None:
    """And prompts may be token ids; speeds are shown in their order, each once, full depth always."""
    recipe["data"] |= {"references": None, "prompt": "ids"}
    found = evaluate(EvalConfig.model_validate({**recipe, "speedups": [3, 2, 3]}))
    assert [line.name for line in found.lines] == ["1x", "3x", "2x"]
    assert found.metric == "fidelity"
    assert found.chance["fidelity"].value < found.lines[0].scores["fidelity"].value
    assert set(found.lines[0].scores) == {"agreement_exact", "token_kl", "fidelity"}
    own, three = (found.lines[number].scores for number in (0, 1))
    assert own["fidelity"].loss == 0 < three["fidelity"].loss
    brief = {**recipe, "sampling": {"max_new_tokens": 8}, "output": str(tmp_path / "brief")}
    assert evaluate(EvalConfig.model_validate(brief)).metric == "agreement_exact"
    answers = pq.read_table(tmp_path / "out" / "answers-3x.parquet")
    assert answers["prompt"].to_pylist()[1] == [4, 5, 7]
    assert "references" not in answers.column_names


def test_choices_are_scored_by_exact_match(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["data"]["references"] = "label"
    recipe["choices"] = ["red", "green", "blue"]
    found = evaluate(EvalConfig.model_validate(recipe))
    assert (found.metric, found.batch) == ("exact_match", 64)
    assert "bleu" not in found.lines[0].scores
    given = pq.read_table(tmp_path / "out" / "answers-1x.parquet")["answer"].to_pylist()
    assert set(given) <= set(recipe["choices"])
    hits = sum(one == label for one, label in zip(given, ["red", "green", "red", "blue"], strict=True))
    assert found.lines[0].scores["exact_match"].value == 25 * hits
    assert found.chance["agreement_exact"].value == 25 * max(map(given.count, given))
    assert "token_kl" not in found.chance


def test_speeds_keep_what_the_checkpoint_says() -> None:
    spec = ScheduleSpec(depths=(9, 8), horizon=7, decay="step", keep_order="even", prompt="first")
    one, two = speeds(spec, [1, 2.5])
    assert (one.name, one.nominal) == ("1x", 1)
    assert two.name == "2.5x" and two.spec == ScheduleSpec(
        speedup=2.5, horizon=7, decay="step", keep_order="even", prompt="first"
    )
    assert one.spec.build(12).depths == (12,)


def test_a_keep_order_is_measured_on_the_rows_once(recipe: dict[str, Any], tmp_path: Path, own_cache: Path) -> None:
    recipe["schedule"] = {"keep_order": "measured"}
    first = run(recipe, tmp_path)
    assert first.exit_code == 0, first.output
    assert "measuring the keep order on 4 answers" in first.stderr
    (record,) = (own_cache / "keep-orders").iterdir()
    assert sorted(json.loads(record.read_text())["keep_order"]) == list(range(4))
    found = run(recipe, tmp_path)
    assert found.exit_code == 0, found.output
    assert ", read from " in found.stderr


def test_lines_are_compared_with_a_reference_model(recipe: dict[str, Any], tmp_path: Path, checkpoint: Path) -> None:
    """With the same weights, stored twice, all scores are those without it, but for rounding; and a baseline's too."""
    alone = evaluate(EvalConfig.model_validate(recipe))
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "skipdecode.json").unlink()
    copies = {"reference_model": str(tmp_path / "copy"), "baselines": {"a twin": str(tmp_path / "copy")}}
    found = evaluate(EvalConfig.model_validate({**recipe, **copies}))
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


def test_without_decode_steps_there_is_no_depth(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["sampling"]["max_new_tokens"] = 1
    result = run(recipe, tmp_path)
    assert result.exit_code == 0, result.output
    for line in json.loads((tmp_path / "out" / "table.json").read_text()):
        assert line["layer_ratio"] is None and line["mean_depth"] is None
    schema = pq.read_schema(tmp_path / "out" / "table.parquet")
    assert (schema.field("layer_ratio").type, schema.field("mean_depth").type) == (pa.float64(), pa.float64())
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


def test_brackets_in_names_and_answers_are_printed_as_they_are(tmp_path: Path) -> None:
    line = Line("model [b]", None, "full", None, 1.0, {"fidelity": Score(1, 0, 0)}, warnings=("'[/INST]'",))
    out = io.StringIO()
    print_tables(wide_console(out), Evaluation([line], tmp_path, 2, 64, "fidelity", "model [b]", {}))
    assert "model [b]: '[/INST]'" in out.getvalue() and "\nmodel [b]  " in out.getvalue()


def test_infinity_and_nan_are_null_in_json(tmp_path: Path) -> None:
    score = Score(float("inf"), float("nan"), 0.0, 1.0, float("inf"))
    line = Line("1x", 1.0, "full", 1.0, 1.0, {"fidelity": score})
    write_table(Evaluation([line], tmp_path, 2, 64, "fidelity", "1x", {}))
    [row] = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)
    assert (row["fidelity"], row["fidelity_low"], row["fidelity_loss"]) == (None, 1, None)


def test_batches_are_those_that_fit_at_full_depth(recipe: dict[str, Any]) -> None:
    """Skipping layers saves cache; the rows are cut alike all the same."""
    found = evaluate(EvalConfig.model_validate({**recipe, "cache_bytes": 40_000}))
    assert 1 <= found.batch < 4
    with pytest.raises(ValueError, match=r"eval.parquet: row \d: needs \d+ bytes of cache at full depth"):
        evaluate(EvalConfig.model_validate({**recipe, "cache_bytes": 1000}))


BAD = [
    ({"data": {"references": "answer"}}, r"no column 'answer'; it has .*; to measure agreement with full depth"),
    ({"data": {"prompt": "question"}}, "no column 'question'; it has prompt"),
    ({"data": {"references": "none"}}, "row 0 needs at least one reference; column 'none' must hold"),
    ({"data": {"references": "ids"}}, "row 0 needs at least one reference; column 'ids' must hold text"),
    ({"data": {"prompt": "blank"}}, "row 1: column 'blank' must hold text or token ids"),
    ({"data": {"prompt": "empty"}}, "row 1: column 'empty' must hold text or token ids"),
    ({"data": {"prompt": "wild"}}, "row 2: the prompt is empty, or has a token outside the model's"),
    ({"data": {"prompt": "long"}}, r"row 0: prompt of \d+ tokens leaves no room in a context of 64"),
    ({"data": {"limit": 1}}, "1 row to score, but intervals need 2 or more"),
    ({"data": {"references": "label"}, "choices": ["red", "green"]}, "row 3: label 'Blue ' is not one of choices"),
    ({"choices": ["red", "red"]}, "'red' is repeated"),
    ({"choices": ["red", "blue"], "sampling": {"stop": ["x"]}}, "choices cannot be combined with sampling.stop"),
    ({"reference_model": "other"}, "other has another tokenizer than"),
    ({"speedups": [0.5]}, "speedup = 0.5: must be at least 1"),
    ({"schedule": {"max_depth": 3}}, "schedule.max_depth: evaluate sets the depths for each of the speedups"),
    ({"sampling": {"temperature": 1.0, "n": 2}}, "sampling.n: evaluate scores only one answer per row"),
    ({"sampling": {"logprobs": 2}}, "sampling.logprobs: evaluate writes no log-probabilities"),
    ({"speedups": [2, 2.0000001]}, r"speedups: 2.0 and 2.0000001 are both shown as 2x"),
    ({"output": "s3://bucket/out"}, "output: s3://bucket/out is not local; name a local folder"),
    ({"output": "eval.yaml"}, "output: eval.yaml: cannot be created: File exists"),
    ({"output": "link"}, "holds '.*' and no evaluate.json of an earlier run; choose"),
    ({"data": {"path": "."}, "output": "link/out"}, "link/out and data.path .* overlap"),
    ({"baselines": {"a b": "other", "a/b": "other"}}, "baselines: 'a/b' and 'a b' would write the same file; rename"),
    ({"baselines": {"chance": "other"}}, "baselines: 'chance' and 'chance' would write the same file; rename"),
    ({"baselines": {"reference/model": "other"}}, "'reference/model' and 'reference model' would write the same file"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=range(len(BAD)))
def test_refused_in_one_line_before_a_model_is_loaded(
    changes: dict[str, Any],
    message: str,
    recipe: dict[str, Any],
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = pq.read_table(tmp_path / "eval.parquet")
    for name, values in {
        "none": [[], ["a"], ["b"], ["c"]],
        "blank": ["a", " ", "b", "c"],
        "empty": [[4], [], [5], [6]],
        "wild": [[4], [5], [9999], [6]],
        "long": ["word " * 99] * 4,
    }.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, tmp_path / "eval.parquet")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "other")
    train_tokenizer(["quite other words"], vocab_size=290).save_pretrained(tmp_path / "other")
    assert load_tokenizer(tmp_path / "other").get_vocab() != load_tokenizer(checkpoint).get_vocab()

    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr("pipeline.learn.evaluate.inputs.Generator", lambda *_, **__: pytest.fail("a model was loaded"))
    for key, value in changes.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    result = run(recipe, tmp_path)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


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

    monkeypatch.setattr("pipeline.learn.evaluate.run.answer", answer)
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
