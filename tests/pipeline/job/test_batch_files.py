"""Whole jobs over OpenAI batch files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from in_process import run_in_process

from actors.engine.errors import UserError
from actors.openai_requests import CHAT, TEXT
from pipeline.config.job import JobConfig


def request(number: int, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": {"model": "any", **body}}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


REQUESTS = [
    request(0, CHAT, messages=chat("alpha"), max_tokens=3),
    request(1, TEXT, prompt="alpha bravo", max_tokens=4),
    request(2, CHAT, messages=chat("bravo"), max_completion_tokens=2, logprobs=True, top_logprobs=2),
    request(3, TEXT, prompt="cheap", max_tokens=3, n=2, temperature=1.0, seed=7),
    request(4, CHAT, messages=chat("alpha"), max_token=3),
    request(5, TEXT, prompt="alpha " * 200),
    request(6, TEXT, prompt="pub", max_tokens=2, logprobs=1),
    request(7, CHAT, messages=chat("cheap pub"), max_tokens=5, stop=["e"]),
]
ERRORS = {
    4: "body: max_token is not supported; did you mean max_tokens?",
    5: "prompt of 1003 tokens leaves no room in a context of 64",
}


def write(path: Path, requests: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))


def config(path: Path, output: Path, checkpoint: Path, **changes: Any) -> JobConfig:
    values: dict[str, Any] = {
        "input": {"path": str(path), "format": "openai_batch"},
        "output": {"path": str(output)},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 6},
        "actors": {"threads": 1, "max_batch": 8},
        "shard_rows": 3,
    }
    return JobConfig.model_validate({**values, **changes})


def answers(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_request_is_answered_by_its_own_parameters(tmp_path: Path, chat_checkpoint: Path) -> None:
    """A chat and a text have the answers that a messages and a prompt column have."""
    write(tmp_path / "in.jsonl", REQUESTS)
    job = config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint)
    totals = run_in_process(job).totals
    assert (totals.rows, totals.answers, totals.errors) == (8, 9, 2)
    rows = answers(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"request-{number}" for number in (0, 1, 2, 3, 3, 4, 5, 6, 7)]
    assert {row["id"]: row["error"] for row in rows if row["error"]} == {
        f"request-{number}": error for number, error in ERRORS.items()
    }
    by_id = {(row["id"], row["sample_index"]): row for row in rows}
    assert by_id["request-1", 0]["generated_tokens"] == 4
    assert by_id["request-2", 0]["generated_tokens"] == len(by_id["request-2", 0]["logprobs"]) == 2
    assert len(by_id["request-2", 0]["logprobs"][0]["top"]) == 2
    assert by_id["request-0", 0]["logprobs"] is None
    for number, columns, body in (
        (0, {"messages": "m"}, {"m": chat("alpha"), "k": 3}),
        (1, {"prompt": "p"}, {"p": "alpha bravo", "k": 4}),
    ):
        write(tmp_path / "one.jsonl", [body])
        source = {"path": str(tmp_path / "one.jsonl"), "sampling": {"max_new_tokens": "k"}, **columns}
        output = tmp_path / f"one-{number}"
        run_in_process(config(tmp_path, output, chat_checkpoint, input=source))
        (alone,) = answers(output)
        assert alone["generated_text"] == by_id[f"request-{number}", 0]["generated_text"]


def test_a_custom_id_that_two_rows_share_is_refused(tmp_path: Path, chat_checkpoint: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", REQUESTS[:3])
    write(tmp_path / "in" / "b.jsonl", [REQUESTS[4], REQUESTS[1]])
    job = config(tmp_path / "in", tmp_path / "out", chat_checkpoint)
    with pytest.raises(UserError) as refused:
        run_in_process(job)
    shared = f"custom_id 'request-1' of row 1 is also that of row 1 of {tmp_path}/in/a.jsonl; make it unique"
    assert str(refused.value) == f"{tmp_path}/in/b.jsonl: {shared}"
    assert not (tmp_path / "out").exists()


def test_a_request_is_whole(tmp_path: Path, chat_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="prompt does not go with format: openai_batch"):
        config(tmp_path, tmp_path, chat_checkpoint, input={"path": "a", "format": "openai_batch", "prompt": "p"})
    write(tmp_path / "in.jsonl", [{"prompt": "alpha"}])
    with pytest.raises(UserError, match=r"in\.jsonl: no column 'custom_id'; it has prompt"):
        run_in_process(config(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint))
