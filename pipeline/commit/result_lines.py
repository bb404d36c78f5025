"""The rows of a part as lines of JSON: of answers, or of OpenAI's batch results and errors.

Source: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import types

from actors.openai_answers import completion_body, error_body
from pipeline.config.job import RESULT_NAMES
from pipeline.input.schema import rebuilt
from pipeline.input.shards import Shard
from pipeline.storage.parquet import read_parquet

Line = tuple[str, bytes]  # name of the result, without suffix; a line with its end
ANSWERS, RESULTS, ERRORS = RESULT_NAMES


def answer_lines(part: bytes, _: Shard) -> list[Line]:
    """Each output row as an object with the part's columns."""
    return [(ANSWERS, _line(row)) for row in _rows(part)]


def batch_lines(part: bytes, shard: Shard, fingerprint: str, created: int, model: str) -> list[Line]:
    """The lines of a batch file's answers: a request's samples are the choices of one response.

    fingerprint: of the job; ids follow from it, from file and row. created: seconds since 1970.
    """
    requests: list[list[dict[str, Any]]] = []
    for row in _rows(part):
        if row["sample_index"] == 0:
            requests.append([])
        requests[-1].append(row)
    lines = []
    for row_number, samples in enumerate(requests, shard.first_row):
        first, key = samples[0], hashlib.sha256(f"{fingerprint}\0{shard.url}\0{row_number}".encode()).hexdigest()[:24]
        body: Mapping[str, Any]
        if first["generated_text"] is not None:  # cut off before the end of its form, it has an error too
            name, status, job = RESULTS, 200, f"fp_{fingerprint[:10]}"
            body = completion_body(first["url"], samples, key=key, created=created, model=model, job=job)
        else:
            is_request = not first["prompt_tokens"]  # else it had become a prompt
            name, status = ERRORS, 400 if is_request else 500
            where = f"row {row_number} of {shard.url}: " if first["id"] is None else ""
            body = error_body(f"{where}{first['error']}", is_request=is_request)
        response = {"status_code": status, "request_id": f"req_{key}", "body": body}
        line = {"id": f"batch_req_{key}", "custom_id": first["id"], "response": response, "error": None}
        lines.append((name, _line(line)))
    return lines


def _rows(part: bytes) -> list[dict[str, Any]]:
    table = read_parquet(part)
    schema = pa.schema([(field.name, _as_text(field.type)) for field in table.schema])
    rows: list[dict[str, Any]] = table.cast(schema).to_pylist()
    return rows


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with text for times and decimals, at any depth: Python cannot hold all that Arrow does."""
    if types.is_decimal(kind) or (types.is_temporal(kind) and not types.is_interval(kind)):
        return pa.string()
    return rebuilt(kind, _as_text)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes as base64, no number as null, anything else that JSON lacks as its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int) else str(value)


def cut(lines: Iterator[Line], size: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of files of at most `size` bytes, or of one line: `results.jsonl`, then `results-0001.jsonl`."""
    files, counts = dict[str, bytearray](), Counter[str]()

    def finish_file(kind: str) -> tuple[str, bytes]:
        number = counts[kind]
        counts[kind] += 1
        return f"{kind}-{number:04d}.jsonl" if number else f"{kind}.jsonl", bytes(files.pop(kind))

    for kind, line in lines:
        if kind in files and len(files[kind]) + len(line) > size:
            yield finish_file(kind)
        files.setdefault(kind, bytearray()).extend(line)
    for kind in sorted(files):
        yield finish_file(kind)
