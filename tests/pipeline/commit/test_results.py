"""Answers as JSON Lines: what is written, how it is cut, and which files are never touched."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from memory_folder import MemoryFolder

from actors.engine.types import NOT_NUMBERS
from pipeline.commit import results
from pipeline.commit.results import answer_lines, batch_lines, cut, recorded, remove_results, result_problems
from pipeline.input.shards import Shard
from pipeline.storage.parquet import parquet_bytes

FAILED = "json_schema: Parser Error: too many items"  # of an answer that has tokens


def part(rows: list[dict[str, Any]]) -> bytes:
    return parquet_bytes(pa.Table.from_pylist(rows))


@given(st.lists(st.tuples(st.sampled_from(["results", "errors"]), st.integers(0, 30))), st.integers(1, 60))
def test_files_hold_the_lines_in_order_within_their_size(lengths: list[tuple[str, int]], size: int) -> None:
    lines = [(kind, f"{number}{'x' * length}\n".encode()) for number, (kind, length) in enumerate(lengths)]
    files = list(cut(iter(lines), size))
    assert len(dict(files)) == len(files)
    for kind in ("results", "errors"):
        own = [(name, data) for name, data in sorted(files) if name.startswith(kind)]
        expected = [line for other, line in lines if other == kind]
        assert b"".join(data for _, data in sorted(own, key=lambda file: (len(file[0]), file[0]))) == b"".join(expected)
        assert all(len(data) <= size or data.count(b"\n") == 1 for _, data in own)
        assert not own or f"{kind}.jsonl" in dict(own)


def test_values_that_json_lacks_are_text_or_null() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    row = {"id": b"\xff", "n": float("nan"), "d": Decimal("1.50"), "t": at, "s": {"a": [1.5, None]}, "g": "grün"}
    far = pa.array([[2**50]], pa.list_(pa.timestamp("s")))
    ((_, distant),) = answer_lines(parquet_bytes(pa.table({"t": far})), Shard(0, "in", 0, 1))
    assert json.loads(distant) == {"t": ["<value out of range: 1125899906842624000>"]}
    for kind in (pa.timestamp("s", "Nowhere/Here"), pa.list_(pa.timestamp("s", "Nowhere/Here"))):
        value = [[7]] if pa.types.is_list(kind) else [7]
        ((_, unknown),) = answer_lines(parquet_bytes(pa.table({"t": pa.array(value, kind)})), Shard(0, "in", 0, 1))
        assert "1970-01-01 00:00:07.000+0000" in unknown.decode()
    ((kind, line),) = answer_lines(part([row]), Shard(0, "in", 0, 1))
    assert kind == "answers" and line.endswith(b"\n") and "grün".encode() in line
    assert json.loads(line) == {
        "id": "/w==",
        "n": None,
        "d": "1.50",
        "t": "2026-01-02 03:04:05.000000Z",
        "s": {"a": [1.5, None]},
        "g": "grün",
    }


def test_a_request_has_one_line_with_all_its_samples() -> None:
    answer = {"prompt_tokens": 4, "generated_tokens": 2, "finish_reason": "stop", "error": None, "logprobs": None}
    failed = {**answer, "generated_text": None, "generated_tokens": 0, "finish_reason": "error"}
    token = {
        "token_id": 3,
        "token": "d",
        "logprob": -0.5,
        "top": [{"token_id": 3, "token": "d", "logprob": -0.5}, {"token_id": 4, "token": "\ufffd", "logprob": -1.0}],
    }
    text = {"url": "/v1/completions", "sample_index": 0}
    ended = {"finish_reason": "error", "generated_text": "{"}
    rows = [
        {"id": "a", "url": "/v1/chat/completions", "sample_index": 0, **answer, "generated_text": "x"},
        {"id": "a", "url": "/v1/chat/completions", "sample_index": 1, **answer, "generated_text": "y"},
        {"id": None, "url": None, "sample_index": 0, **failed, "prompt_tokens": 0, "error": "not JSON"},
        {"id": "cut", **text, **answer, "generated_text": "{", "error": "cut off"},
        {"id": "c", **text, **failed, "error": "memory"},
        {"id": "d", **text, **answer, "generated_text": "z", "logprobs": [token] * 2},
        {"id": "e", **text, **answer, "generated_text": "z"},
        {"id": "e", **text, **answer, "sample_index": 1, **ended, "error": FAILED},
        {"id": "f", **text, **answer, **ended, "error": NOT_NUMBERS},
    ]
    lines = batch_lines(part(rows), Shard(2, "in.jsonl", 10, 5), "f" * 64, 17, "model")
    assert [kind for kind, _ in lines] == ["results", "errors", "results", "errors", "results", "errors", "errors"]
    chat, bad, cut_off, memory, logged, form, numbers = (json.loads(line) for _, line in lines)
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("a", None, 200)
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and (body["created"], body["model"]) == (17, "model")
    assert [choice["message"]["content"] for choice in body["choices"]] == ["x", "y"]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert (bad["custom_id"], bad["response"]["status_code"]) == (None, 400)
    assert bad["response"]["body"]["error"]["message"] == "row 11 of in.jsonl: not JSON"
    assert cut_off["response"]["body"]["choices"][0]["text"] == "{"
    assert memory["response"]["status_code"] == 500
    assert memory["response"]["body"]["error"]["type"] == "server_error"
    assert (form["response"]["status_code"], numbers["response"]["status_code"]) == (400, 500)
    assert form["response"]["body"]["error"]["message"] == FAILED
    assert logged["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["d", "d"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"d": -0.5, "\ufffd": -1.0}] * 2,
        "text_offset": [0, 1],
    }
    assert len({line["id"] for line in (chat, bad, memory, logged)}) == 4


def test_only_recorded_bytes_are_removed() -> None:
    folder = MemoryFolder()
    for name in ("results.jsonl", "errors.jsonl", "notes.txt"):
        folder.create(name, b"ours")
    digest = "0" * 64
    ours = hashlib.sha256(b"ours").hexdigest()
    record = {"results.jsonl": ours, "errors.jsonl": digest, "notes.txt": ours}
    folder.replace(results.RECORD, json.dumps(record).encode())
    assert [line.split(": ")[1] for line in result_problems(folder)] == [
        "changed since it was written (sha256 differs); delete it and run again"
    ]
    remove_results(folder)
    assert sorted(folder.names()) == ["errors.jsonl", "notes.txt"]
    for damaged in (b"", b"[]", b'{"results.jsonl": 1}'):
        folder.replace(results.RECORD, damaged)
        assert recorded(folder) == {}
