"""Writes the answers as JSON Lines beside the parts once every row is committed, if `output.format` asks for it.

The files depend only on the committed parts and the plan. If a run is killed between two files, the next run writes the
missing ones. Each file is created whole and never replaces another program's file. `_job/results.json` gets the file's
digest before the file is written: --overwrite removes only files with a recorded digest.

Source of batch files: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError
from actors.openai_answers import completion_body, error_body
from pipeline.commit.sink import PARTS_AT_ONCE, part_name
from pipeline.config.job import RESULT_NAMES, JobConfig
from pipeline.input.schema import rebuilt
from pipeline.input.shards import Shard
from pipeline.plan.manifest import Manifest
from pipeline.runtime.announce import announced
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, read_json, write_json
from pipeline.storage.parquet import read_parquet

Line = tuple[str, bytes]  # kind of file (`ANSWERS`, `RESULTS` or `ERRORS`); a line with its line end
ANSWERS, RESULTS, ERRORS = RESULT_NAMES
RECORD = "_job/results.json"
FILE_BYTES = 256 * 2**20  # maximum bytes of a file, which is written in one put
KINDS: dict[str, tuple[str, ...]] = {"jsonl": (ANSWERS,), "openai_batch": (RESULTS, ERRORS)}  # format -> kinds of files
NAME = re.compile(rf"({ANSWERS}|{RESULTS}|{ERRORS})(-\d{{4,}})?\.jsonl")  # only such files are written or removed


def write_results(folder: Folder, manifest: Manifest, config: JobConfig) -> None:
    """Write the files that `output.format` asks for, from the parts of a job whose rows are all committed.

    Raises UserError if a file of the same name exists that this job did not write.
    """
    kinds = KINDS.get(config.result_format, ())
    if not kinds:
        return
    to_lines: Callable[[bytes, Shard], list[Line]] = answer_lines
    if config.result_format == "openai_batch":
        created, model = int(manifest.batching.planned), config.model.path
        to_lines = partial(batch_lines, fingerprint=manifest.fingerprint, created=created, model=model)
    known, written = recorded(folder), set[str]()
    with announced("writing the answers as JSON Lines"):
        for name, data in cut(_lines(folder, manifest, to_lines), FILE_BYTES):
            digest = _sha256(data)
            _record(folder, {**known, name: [*known.get(name, []), digest]}, done=False)
            if not folder.create(name, data):
                found = _sha256(folder.read(name))
                if found != digest and found not in known.get(name, []):
                    _record(folder, known, done=False)
                    raise _taken(folder, name)
                if found != digest:  # lost parts were answered again with other bytes
                    folder.replace(name, data)
            known[name] = [digest]
            written.add(name)
    for name in [name for name in known if name not in written and _kind(name) in kinds]:
        _remove_own(folder, name, known.pop(name))
    _record(folder, known, done=True)


def check_free(folder: Folder, config: JobConfig) -> None:
    """Raise UserError, before a new job runs, if a file that no job wrote has the name of a result file."""
    kinds, known = KINDS.get(config.result_format, ()), recorded(folder)
    for name in folder.names() if kinds else ():
        if _kind(name) in kinds and _sha256(folder.read(name)) not in known.get(name, []):
            raise _taken(folder, name)


def has_results(folder: Folder, config: JobConfig) -> bool:
    """Tell whether all files that `output.format` asks for were written, and still exist."""
    kinds = KINDS.get(config.result_format, ())
    if not kinds:
        return True
    files, done = _read(folder)
    own = [name for name in files if _kind(name) in kinds]
    return done and bool(own) and all(folder.exists(name) for name in own)


def recorded(folder: Folder) -> dict[str, list[str]]:
    """Return the digests of each recorded file: one, or the old and the new one while the file is being replaced."""
    return _read(folder)[0]


def remove_results(folder: Folder) -> None:
    """Remove the recorded files whose content is unchanged."""
    for name, digests in recorded(folder).items():
        _remove_own(folder, name, digests)


def result_problems(folder: Folder) -> Iterator[str]:
    """Return one line for each recorded file that is gone or has other content."""
    for name, digests in recorded(folder).items():
        try:
            if _sha256(folder.read(name)) not in digests:
                yield f"{folder.url}/{name}: not what was written (sha256 differs); delete it and run again"
        except FileNotFoundError:
            yield f"{folder.url}/{name}: written and gone; run the job again to write it"


def _lines(folder: Folder, manifest: Manifest, to_lines: Callable[[bytes, Shard], list[Line]]) -> Iterator[Line]:
    def lines(shard: Shard) -> list[Line]:
        return to_lines(folder.read(part_name(shard.index)), shard)

    for first in range(0, len(manifest.shards), PARTS_AT_ONCE):
        for of_part in in_parallel(lines, manifest.shards[first : first + PARTS_AT_ONCE], PARTS_AT_ONCE):
            yield from of_part


def _read(folder: Folder) -> tuple[dict[str, list[str]], bool]:
    """Return name -> digests of recorded files, and whether all were written. Without a valid record: empty, False."""
    try:
        values = read_json(folder, RECORD)
        files = {str(name): [str(digest) for digest in digests] for name, digests in values["files"].items()}
        return {name: digests for name, digests in files.items() if _kind(name)}, values["done"] is True
    except (KeyError, TypeError, AttributeError):
        return {}, False


def _record(folder: Folder, files: Mapping[str, Sequence[str]], *, done: bool) -> None:
    write_json(folder, RECORD, {"files": files, "done": done})


def _kind(name: str) -> str:
    match = NAME.fullmatch(name)
    return match[1] if match else ""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove_own(folder: Folder, name: str, digests: Sequence[str]) -> None:
    with suppress(FileNotFoundError):
        if _sha256(folder.read(name)) in digests:
            folder.remove(name)


def _taken(folder: Folder, name: str) -> UserError:
    return UserError(f"{folder.url}/{name}: not written by this job; move it away and run again")


def answer_lines(part: bytes, _: Shard) -> list[Line]:
    """Return each row of a part as one line of JSON with the part's columns."""
    return [(ANSWERS, _line(row)) for row in _rows(part)]


def batch_lines(part: bytes, shard: Shard, fingerprint: str, created: int, model: str) -> list[Line]:
    """Return an OpenAI batch result line for each request. The choices of its response are the request's samples.

    fingerprint: of the job; response ids are derived from it, the file and the row. created: seconds since 1970.
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
        if first["generated_text"] is not None:  # an answer that was cut off has an error too
            name, status, job = RESULTS, 200, f"fp_{fingerprint[:10]}"
            body = completion_body(first["url"], samples, key=key, created=created, model=model, job=job)
        else:
            is_request = not first["prompt_tokens"]  # an invalid request has no prompt tokens
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
    """Return the type with times and decimals, at any depth, as text: Python cannot represent all Arrow values."""
    if types.is_decimal(kind) or (types.is_temporal(kind) and not types.is_interval(kind)):
        return pa.string()
    return rebuilt(kind, _as_text)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: bytes as base64, NaN and infinity as null, other types as their text."""
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
    """Yield name (`results.jsonl`, `results-0001.jsonl`) and bytes of each file: `size` bytes at most, or one line."""
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
