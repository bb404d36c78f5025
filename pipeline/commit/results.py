"""Writes the answers as JSON Lines files (result files) if `output.format` asks for them, after all rows are committed.

The files depend only on the plan and the committed parts (one output file per shard). If a run is killed between two
files, the next run writes the missing ones. A file is created whole, and never replaces another program's file: it
replaces only a file whose digest is in `_job/results.json`, which is written last.

Format of batch files: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError
from actors.openai_answers import response
from pipeline.commit.sink import PARTS_AT_ONCE, part_name
from pipeline.config.job import RESULT_NAMES, JobConfig
from pipeline.input.schema import rebuilt
from pipeline.input.shards import Shard
from pipeline.plan.manifest import Manifest
from pipeline.runtime.announce import announced
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, read_json, write_json
from pipeline.storage.parquet import read_parquet

Line = tuple[str, bytes]  # kind of file (`ANSWERS`, `RESULTS` or `ERRORS`), and a line that ends with a newline
ANSWERS, RESULTS, ERRORS = RESULT_NAMES
RECORD = "_job/results.json"
FILE_BYTES = 256 * 2**20  # maximum size of a file, because a file is written in one put request
KINDS: dict[str, tuple[str, ...]] = {"jsonl": (ANSWERS,), "openai_batch": (RESULTS, ERRORS)}  # format -> kinds of files
NAME = re.compile(rf"({ANSWERS}|{RESULTS}|{ERRORS})(-\d{{4,}})?\.jsonl")  # names of result files


def write_results(folder: Folder, manifest: Manifest, config: JobConfig) -> None:
    """Write the result files that `output.format` requires. All rows must be committed, and the lease must be held.

    Raises UserError if another program's file has the name of a result file.
    """
    kinds = KINDS.get(config.result_format, ())
    if not kinds:
        return
    to_lines: Callable[[bytes, Shard], list[Line]] = answer_lines
    if config.result_format == "openai_batch":
        created, model = int(manifest.batching.planned), config.model.path
        to_lines = partial(batch_lines, fingerprint=manifest.fingerprint, created=created, model=model)
    known, written = recorded(folder), dict[str, str]()
    with announced("writing the answers as JSON Lines"):
        for name, data in cut(_lines(folder, manifest, to_lines), FILE_BYTES):
            written[name] = _sha256(data)
            if not folder.create(name, data) and (found := _sha256(folder.read(name))) != written[name]:
                if found != known.get(name):
                    raise _taken(folder, name)
                folder.replace(name, data)  # parts were lost and written again with other bytes
    former = {name: digest for name, digest in known.items() if _kind(name) in kinds and name not in written}
    _remove(folder, former)
    kept = {name: digest for name, digest in known.items() if name not in former}
    write_json(folder, RECORD, {**kept, **written})


def check_free(folder: Folder, config: JobConfig) -> None:
    """Raise UserError if another program's file has the name of a result file. Call this before a new job runs."""
    kinds, known = KINDS.get(config.result_format, ()), recorded(folder)
    for name in folder.names() if kinds else ():
        if _kind(name) in kinds and _sha256(folder.read(name)) != known.get(name):
            raise _taken(folder, name)


def has_results(folder: Folder, config: JobConfig) -> bool:
    """Return whether all result files that `output.format` requires were written and still exist."""
    kinds = KINDS.get(config.result_format, ())
    own = [name for name in recorded(folder) if _kind(name) in kinds]
    return not kinds or (bool(own) and all(folder.exists(name) for name in own))


def recorded(folder: Folder) -> dict[str, str]:
    """Return name -> digest of each result file that the job has written; an empty dict if the record is damaged."""
    files = read_json(folder, RECORD, dict[str, str]) or {}
    return {name: digest for name, digest in files.items() if _kind(name)}


def remove_results(folder: Folder) -> None:
    """Remove each result file whose content still has the recorded digest."""
    _remove(folder, recorded(folder))


def result_problems(folder: Folder) -> Iterator[str]:
    """Yield one line for each recorded result file that is missing or has changed."""
    for name, digest in recorded(folder).items():
        try:
            if _sha256(folder.read(name)) != digest:
                yield f"{folder.url}/{name}: changed since it was written (sha256 differs); delete it and run again"
        except FileNotFoundError:
            yield f"{folder.url}/{name}: was written and is gone; run the job again to write it"


def _lines(folder: Folder, manifest: Manifest, to_lines: Callable[[bytes, Shard], list[Line]]) -> Iterator[Line]:
    def lines(shard: Shard) -> list[Line]:
        return to_lines(folder.read(part_name(shard.index)), shard)

    for first in range(0, len(manifest.shards), PARTS_AT_ONCE):  # limits the number of parts in memory
        for lines_of_part in in_parallel(lines, manifest.shards[first : first + PARTS_AT_ONCE], PARTS_AT_ONCE):
            yield from lines_of_part


def _kind(name: str) -> str:
    match = NAME.fullmatch(name)
    return match[1] if match else ""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove(folder: Folder, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
        with suppress(FileNotFoundError):
            if _sha256(folder.read(name)) == digest:
                folder.remove(name)


def _taken(folder: Folder, name: str) -> UserError:
    return UserError(f"{folder.url}/{name}: not written by this job; move it away and run again")


def answer_lines(part: bytes, _: Shard) -> list[Line]:
    """Return each row of `part` (an output file's bytes) as one line of JSON with the same columns."""
    return [(ANSWERS, _line(row)) for row in rows_of(part)]


def batch_lines(part: bytes, shard: Shard, fingerprint: str, created: int, model: str) -> list[Line]:
    """Return one OpenAI batch result line per request. The samples of a request become the choices of the response.

    fingerprint: the job's fingerprint; each response id is a hash of it and the row's place. created: Unix time.
    """
    requests: list[list[dict[str, Any]]] = []
    for row in rows_of(part):
        if row["sample_index"] == 0:
            requests.append([])
        requests[-1].append(row)
    lines = []
    for row_number, samples in enumerate(requests, shard.first_row):
        first = samples[0]
        key = hashlib.sha256(f"{fingerprint}\0{shard.url}\0{row_number}".encode()).hexdigest()[:24]
        named = {"key": key, "created": created, "model": model, "job": f"fp_{fingerprint[:10]}"}
        names_row = first["id"] is not None or (first["error"] or "").endswith(", counted from 0)")  # see text_files.py
        where = "" if names_row else f"row {row_number} of {shard.url}: "
        status, body = response(first["url"], samples, where=where, **named)
        answer = {"status_code": status, "request_id": f"req_{key}", "body": body}
        line = {"id": f"batch_req_{key}", "custom_id": first["id"], "response": answer, "error": None}
        lines.append((RESULTS if status == 200 else ERRORS, _line(line)))
    return lines


def rows_of(part: bytes) -> list[dict[str, Any]]:
    """Return the rows of an output file. Times and decimals are texts; times are UTC if a time zone is unknown here."""
    table = read_parquet(part)
    try:
        texts = _cast(table, _as_text)
    except pa.ArrowInvalid:
        texts = _cast(_cast(table, _in_utc), _as_text)
    rows: list[dict[str, Any]] = texts.to_pylist()
    return rows


def _cast(table: pa.Table, change: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    return table.cast(pa.schema([(field.name, change(field.type)) for field in table.schema]))


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """Replace time zones by UTC, at any depth."""
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "+00:00")
    return rebuilt(kind, _in_utc)


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Replace types of times and decimals by string, at any depth, because Python cannot represent all their values."""
    if types.is_decimal(kind) or (types.is_temporal(kind) and not types.is_interval(kind)):
        return pa.string()
    return rebuilt(kind, _as_text)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: bytes become base64, NaN and infinity null, values of other types text."""
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
    """Cut lines into files of at most `size` bytes (a longer line is one file). Yield name and bytes of each file."""
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
