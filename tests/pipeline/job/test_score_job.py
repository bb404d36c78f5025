"""Jobs that score given texts: columns, resume, statistics, schedules, refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from in_process import run_and_read, run_example, run_in_process
from tiny_checkpoint import LAYERS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.cli.app import app
from pipeline.commit.verify import verify
from pipeline.config.job import JobConfig
from pipeline.config.load import validated
from pipeline.generate.stats import ShardStats
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.storage.folder import open_folder

PROMPTS = ["name[Zizzi], food[French]", "area", "The Eagle serves", None, "area", "cheap food near the river"]
WAYS = [[" a pub", " in the city centre"], [" x"], [" French food.", " "], [" y"], [" x", " y", " a place"], []]
SCALARS = ("continuation_tokens", "cumulative_logprob", "perplexity", "is_greedy", "mean_depth")


def values(folder: Path, checkpoint: Path, ways: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    table = pa.table({"key": list(range(6)), "prompt": PROMPTS, "ways": WAYS if ways is None else ways})
    pq.write_table(table, folder / "in.parquet")
    return {
        "task": "score",
        "input": {"path": str(folder / "in.parquet"), "id": "key", "continuations": "ways"},
        "output": {"path": str(folder / "out"), "keep": ["ways"], "token_ids": True},
        "model": {"path": str(checkpoint), "dtype": "float32", "device": "cpu", "cache": str(folder / "cache")},
        "actors": {"threads": 1},
        "shard_rows": 4,
        "max_error_rate": 1.0,
        **changes,
    }


def own_logprobs(checkpoint: Path, prompt: str, text: str) -> tuple[list[float], bool]:
    """By transformers alone: the tiny tokenizer closes the prompt with a special token."""
    tokenizer = tokenizer_of(str(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    greedy = logits.argmax(-1).tolist() == ids
    return [float(each[token]) for token, each in zip(ids, logits, strict=True)], greedy


def test_a_list_of_texts_has_lists_of_scores_at_full_depth(tmp_path: Path, checkpoint: Path) -> None:
    """The checkpoint stores a speed of 2, which a job takes that generates."""
    rows = run_and_read(values(tmp_path, checkpoint))
    assert [row["id"] for row in rows] == list(range(6))
    assert [row["error"] for row in rows] == [*[None] * 3, "prompt is null", None, "continuations is null or empty"]
    for row, prompt, ways in zip(rows, PROMPTS, WAYS, strict=True):
        assert row["ways"] == ways
        if row["error"] is not None:
            assert all(row[name] is None for name in (*SCALARS, "token_logprobs", "token_ids"))
            continue
        assert row["prompt_tokens"] == len(tokenizer_of(str(checkpoint))(prompt)["input_ids"])
        for number, text in enumerate(ways):
            logprobs, greedy = own_logprobs(checkpoint, str(prompt), text)
            assert row["token_logprobs"][number] == pytest.approx(logprobs, abs=1e-4)
            assert row["cumulative_logprob"][number] == pytest.approx(sum(logprobs), abs=1e-4)
            mean = sum(logprobs) / len(logprobs)
            assert row["perplexity"][number] == pytest.approx(torch.tensor(-mean).exp().item(), rel=1e-4)
            assert row["is_greedy"][number] == greedy
            assert row["continuation_tokens"][number] == len(logprobs) == len(row["token_ids"][number])
            assert row["mean_depth"][number] == (LAYERS if len(logprobs) > 1 else None)


def test_a_column_of_texts_has_plain_scores(tmp_path: Path, checkpoint: Path) -> None:
    ways = [ways[0] if ways else None for ways in WAYS]
    rows = run_and_read(values(tmp_path, checkpoint, ways))
    lists = run_and_read(values(tmp_path / "lists", checkpoint, [[text] if text else None for text in ways]))
    for row, each in zip(rows, lists, strict=True):
        for name in (*SCALARS, "token_logprobs", "token_ids"):
            assert row[name] == (None if each[name] is None else each[name][0])
    assert isinstance(rows[0]["cumulative_logprob"], float) and isinstance(rows[0]["token_logprobs"], list)


def test_a_lost_part_is_scored_again_byte_for_byte_and_records_follow_from_parts(
    tmp_path: Path, checkpoint: Path
) -> None:
    config = JobConfig.model_validate(values(tmp_path, checkpoint))
    result = run_in_process(config)
    folder = open_folder(config.output.path, config.storage)
    parts = {name: folder.read(name) for name in ("part-000000.parquet", "part-000001.parquet")}
    lost = tmp_path / "out" / "part-000001.parquet"
    lost.unlink()
    again = run_in_process(config)
    assert again.fresh_rows == 2 and lost.read_bytes() == parts["part-000001.parquet"]
    assert run_in_process(config).fresh_rows == 0
    assert list(verify(folder, again.manifest, config.storage)) == []
    totals = result.totals
    assert (totals.rows, totals.answers, totals.errors) == (6, 6, 2)
    rebuilt = [
        ShardStats.of_part(number, pq.read_table(io.BytesIO(data)), LAYERS)
        for number, data in enumerate(parts.values())
    ]
    for name in ("rows", "errors", "prompt_tokens", "generated_tokens", "decode_steps", "layer_steps"):
        assert sum(getattr(one, name) for one in rebuilt) == getattr(totals, name), name
    assert totals.generated_tokens == sum(
        sum(row["continuation_tokens"] or ()) for row in pq.read_table(config.output.path).to_pylist()
    )


def test_another_column_or_task_is_another_job(tmp_path: Path, checkpoint: Path) -> None:
    job = values(tmp_path, checkpoint)
    run_and_read(job)
    other = {**job, "input": {**job["input"], "continuations": "prompt"}, "output": {**job["output"], "keep": []}}
    with pytest.raises(UserError, match=r"input\.continuations"):
        run_and_read(other)
    generating = {**job, "input": {"path": job["input"]["path"], "id": "key"}}
    del generating["task"]
    with pytest.raises(UserError, match="task"):
        run_and_read({**generating, "schedule": {"speedup": 1}})


@pytest.mark.parametrize("prompt", ["full", "first"])
def test_under_a_schedule_tokens_run_its_layers_and_agreement_is_measured_on_the_texts(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    schedule = {"depths": [3, 1], "prompt": prompt, "min_agreement": 0.0}
    fast = run_and_read(values(tmp_path, checkpoint, schedule=schedule))
    assert "agreement: 0." in capsys.readouterr().err
    full = run_and_read(values(tmp_path / "full", checkpoint))
    for row, other in zip(fast, full, strict=True):
        for number, count in enumerate(row["continuation_tokens"] or ()):
            steps = count - 1
            assert row["mean_depth"][number] == (None if not steps else (3 + (steps - 1)) / steps)
            if prompt == "full":  # the prompt's pass predicts the first token
                assert row["token_logprobs"][number][0] == pytest.approx(other["token_logprobs"][number][0], abs=1e-4)
            if steps:
                assert row["token_logprobs"][number][1:] != pytest.approx(other["token_logprobs"][number][1:], abs=1e-4)


def test_the_perplexity_of_whole_texts_and_json_lines(tmp_path: Path, checkpoint: Path) -> None:
    job = values(tmp_path, checkpoint, ["The Eagle serves French food.", *["a"] * 5])
    job["input"]["template"] = ""
    job["output"] = {"path": job["output"]["path"], "format": "jsonl"}
    rows = run_and_read(job)
    assert rows[0]["cumulative_logprob"] == pytest.approx(
        sum(own_logprobs(checkpoint, "", "The Eagle serves French food.")[0]), abs=1e-4
    )
    lines = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_try_and_the_report_show_scores(in_process: None, tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(values(tmp_path, checkpoint)))
    tried = CliRunner().invoke(app, ["try", str(tmp_path / "job.yaml"), "--rows", "6"])
    assert tried.exit_code == 0, tried.output
    assert "text:  in the city centre" in tried.stdout and "log p -" in tried.stdout
    assert "error: continuations is null or empty" in tried.stdout and not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), "--show", "1"])
    assert done.exit_code == 0, done.output
    assert "scored tokens" in done.stdout and "cumulative_logprob: [-" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"temperature": 1.0}}, "sampling has no meaning with task: score"),
        ({"choices": ["a"]}, "choices has no meaning with task: score"),
        ({"reasoning": {}}, "reasoning has no meaning"),
        ({"output": {"path": "b", "strip": False}}, r"output\.strip has no meaning"),
        ({"actors": {"scheduler": "refill"}}, r"actors\.scheduler has no meaning"),
        ({"model": {"path": "m", "kv_cache": "int8"}, "actors": {"gpus": 1}}, r"model\.kv_cache has no meaning"),
        ({"input": {"path": "a"}}, r"task: score needs input\.continuations"),
        ({"input": {"path": "a", "continuations": "c", "choices": "d"}}, r"input\.choices has no meaning"),
        ({"input": {"path": "a", "format": "openai_batch"}}, r"does not go with input\.format: openai_batch"),
        ({"task": "generate"}, r"input\.continuations is for scoring them: set task: score too"),
        ({"model": {"path": "m", "engine": "paged"}}, r"model\.engine: paged only generates"),
        ({"output": {"path": "b", "keep": ["perplexity"]}}, None),
    ],
)
def test_a_key_without_meaning_is_refused(
    tmp_path: Path, checkpoint: Path, changes: dict[str, Any], message: str | None
) -> None:
    job = values(tmp_path, checkpoint, **changes)
    if message is None:
        with pytest.raises(UserError, match=r"output\.keep: perplexity is the name of an answer column"):
            run_in_process(validated(JobConfig, job, "job.yaml"))
        return
    with pytest.raises(UserError, match=message) as caught:
        validated(JobConfig, job, "job.yaml")
    assert "\n" not in str(caught.value)


def test_a_column_of_another_type_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match="continuations must be string, or a list of strings"):
        run_and_read(values(tmp_path, checkpoint, [1, 2, 3, 4, 5, 6]))


def test_the_example_runs_as_its_comment_says(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_example("score.yaml", tmp_path, monkeypatch, f"model.path={checkpoint}")
    [line] = (tmp_path / "work" / "score" / "scores" / "answers.jsonl").read_text().splitlines()
    assert json.loads(line)["texts"][0] == " Paris." and len(json.loads(line)["cumulative_logprob"]) == 3
