"""Chats, a row's own sampling and labels, samples, log-probabilities and the shared beginning, through a whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from in_process import job_config

from actors.answers import ANSWER_TYPES, Prompt
from actors.generator import Generator
from actors.settings import EngineSettings
from pipeline import job as jobs
from pipeline.prepare.chat import Chat, render_chat

ROWS = 24
LABELS = ["cheap", "cheap food", "river"]
SYSTEM = "You are a guide to places."
OWN: dict[int, dict[str, Any]] = {
    2: {"n": 3, "temperature": 1.0},
    5: {"temperature": -1.0},
    7: {"max_new_tokens": 2},
    11: {"n": 2},  # greedy
}


def write_input(folder: Path) -> None:
    folder.mkdir()
    kind = pa.struct([("temperature", pa.float64()), ("n", pa.int32()), ("max_new_tokens", pa.int64())])
    table = pa.table(
        {
            "id": list(range(ROWS)),
            "chat": [[{"role": "user", "content": f"place {row}"}] if row != 9 else None for row in range(ROWS)],
            "own": pa.array([OWN.get(row) for row in range(ROWS)], kind),
            "labels": [LABELS if row % 4 == 3 else None for row in range(ROWS)],
        }
    )
    pq.write_table(table, folder / "in.parquet")


def run(tmp_path: Path, checkpoint: Path, name: str, **changes: Any) -> tuple[jobs.JobResult, list[dict[str, Any]]]:
    own: dict[str, Any] = {
        "input": {"id": "id", "messages": "chat", "system": SYSTEM, "sampling": "own"},
        "output": {"token_ids": True, "cumulative_logprob": True},
        "sampling": {"logprobs": 1, "seed": 3},
        "actors": {"count": 2, "max_batch": 5},
        "shard_rows": 8,
    }
    outcome = jobs.run(job_config(tmp_path / "in", tmp_path / name, checkpoint, **{**own, **changes}))
    return outcome, pq.read_table(tmp_path / name).to_pylist()


def test_rows_that_ask_for_their_own(in_process: None, chat_checkpoint: Path, tmp_path: Path) -> None:
    write_input(tmp_path / "in")
    outcome, rows = run(tmp_path, chat_checkpoint, "out")
    names = list(ANSWER_TYPES)
    assert pq.read_schema(tmp_path / "out" / "part-000000.parquet").names == [
        *("id", *names, "token_ids", "cumulative_logprob", "logprobs")
    ]
    assert [(row["id"], row["sample_index"]) for row in rows] == [
        (row, sample) for row in range(ROWS) for sample in range(3 if row == 2 else 1)
    ]
    errors = {row["id"]: row["error"] for row in rows if row["error"] is not None}
    assert set(errors) == {5, 9, 11} and errors[9] == "messages is null"
    assert errors[5].startswith("sampling: temperature = -1.0") and errors[11].startswith("sampling: n = 2: needs")
    assert (outcome.totals.rows, outcome.totals.answers, outcome.totals.errors) == (ROWS, ROWS + 2, 3)
    assert outcome.totals.shared_prompt_tokens > 0

    generator = Generator(
        EngineSettings(
            str(chat_checkpoint), sampling={"max_new_tokens": 6, "logprobs": 1}, seed=3, dtype="float32", threads=1
        )
    )
    for row in rows:
        if row["error"] is None:
            text, _ = render_chat(
                generator.tokenizer, Chat(SYSTEM), [{"role": "user", "content": f"place {row['id']}"}]
            )
            ids = generator.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = Prompt(ids, str(tmp_path / "in" / "in.parquet"), row["id"], sampling=OWN.get(row["id"], {}))
            alone = generator.answer([prompt])[row["sample_index"]]
            assert row["token_ids"] == alone.token_ids and row["prompt_tokens"] == len(ids)
            assert [one["token_id"] for one in row["logprobs"]] == row["token_ids"]
            assert all(len(one["top"]) == 1 for one in row["logprobs"])
            told = [one for token in row["logprobs"] for one in (token, *token["top"])]
            assert all(one["token"] == generator.tokenizer.decode([one["token_id"]]) for one in told)
            assert abs(sum(one["logprob"] for one in row["logprobs"]) - row["cumulative_logprob"]) < 1e-4

    outcome, plain = run(tmp_path, chat_checkpoint, "plain", shared_prefix=False)
    assert outcome.totals.shared_prompt_tokens < 200
    assert [row["token_ids"] for row in plain] == [row["token_ids"] for row in rows]


def test_every_row_is_answered_with_one_of_its_labels(in_process: None, chat_checkpoint: Path, tmp_path: Path) -> None:
    write_input(tmp_path / "in")
    given = {"path": str(tmp_path / "in"), "id": "id", "messages": "chat", "choices": "labels"}
    everybody = ["yes", "no", "no idea"]
    _, rows = run(tmp_path, chat_checkpoint, "out", input=given, choices=everybody, sampling={"max_new_tokens": 1})
    answered = [row for row in rows if row["error"] is None]
    assert len(answered) == ROWS - 1
    for row in answered:
        assert row["generated_text"] in (LABELS if row["id"] % 4 == 3 else everybody)
        assert 0 < row["choice_probability"] <= 1 and row["finish_reason"] == "stop"
    assert len({row["generated_text"] for row in answered}) > 2
