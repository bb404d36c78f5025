"""Saves and loads the files of a plan in an output folder.

    _job/inputs.pq, plan.pq, schema.arrow     input files; shards; types of the columns that are read
    _job/job.json                             identity, batching, and digests of the three other files

When a plan is loaded, every file is compared with its digest: a flipped bit could make the job lose or repeat rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter

from actors.engine.errors import UserError
from pipeline.input.files import InputFile
from pipeline.input.shards import Shard
from pipeline.messages import one_line, printable
from pipeline.plan.batching import Batching
from pipeline.plan.manifest import ANSWERS_VERSION, Manifest
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import parquet_bytes, read_parquet

JOB, PLAN, INPUTS, SCHEMA = "_job/job.json", "_job/plan.pq", "_job/inputs.pq", "_job/schema.arrow"
FORMAT = 8
CHECK = ',\n  "check": "'  # last key in job.json; its value is the digest of all bytes before this text


def save(folder: Folder, manifest: Manifest) -> None:
    """Write the plan. `job.json`, which holds the digests of the other files, is written last."""
    columns = {name: [getattr(shard, name) for shard in manifest.shards] for name in _SHARDS.names}
    files = {
        INPUTS: parquet_bytes(pa.Table.from_pylist([asdict(file) for file in manifest.files], schema=_FILES)),
        PLAN: parquet_bytes(pa.table(columns, schema=_SHARDS)),
        SCHEMA: manifest.schema.serialize().to_pybytes(),
    }
    for name, data in files.items():
        folder.replace(name, data)
    values = {
        "format": FORMAT,
        "fingerprint": manifest.fingerprint,
        "identity": manifest.identity,
        "batching": asdict(manifest.batching),
        "sha256": {name: _sha256(data) for name, data in files.items()},
    }
    text = json.dumps(values, indent=2).removesuffix("\n}")
    folder.replace(JOB, _with_check(text.encode()))


def load(folder: Folder) -> Manifest | None:
    """Return the plan in an output folder; None if the folder has no plan.

    If a file is damaged, missing or in another format, raises a UserError that names the file and says what to do.
    """
    try:
        text = folder.read(JOB)
    except (FileNotFoundError, NotADirectoryError):
        return None
    values = _job_values(f"{folder.url}/{JOB}", text)
    data: dict[str, bytes] = {}
    for name in (INPUTS, PLAN, SCHEMA):
        try:
            data[name] = folder.read(name)
        except FileNotFoundError:
            raise UserError(f"{folder.url}/{name}: missing; {_REMEDY}") from None
        if _sha256(data[name]) != values["sha256"][name]:
            raise UserError(f"{folder.url}/{name}: damaged (its SHA-256 is not the one in {JOB}); {_REMEDY}")
    files = TypeAdapter(list[InputFile]).validate_python(read_parquet(data[INPUTS]).to_pylist())
    shards = _shards(read_parquet(data[PLAN]))
    schema = pa.ipc.read_schema(pa.py_buffer(data[SCHEMA]))
    batching = TypeAdapter(Batching).validate_python(values["batching"])
    return Manifest(values["fingerprint"], values["identity"], batching, files, shards, schema)


def is_own(text: bytes) -> bool:
    """Return whether a damaged job.json may be from this program: it is invalid JSON, or it has a fingerprint."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return True
    return isinstance(values, dict) and "fingerprint" in values


_REMEDY = "restore the file from a copy, or start again with --overwrite"


def _with_check(text: bytes) -> bytes:
    """Complete a JSON object whose last brace is missing: append the key `check` (digest of `text`) and the brace."""
    return text + CHECK.encode() + _sha256(text).encode() + b'"\n}\n'


def _job_values(name: str, text: bytes) -> dict[str, Any]:
    """Parse the text of job.json. Raises UserError, with the file's `name`, if it is damaged or in another format."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: damaged ({one_line(error)}); {_REMEDY}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise _other_version(name, "plan has format", found, FORMAT)
    if _with_check(text.rpartition(CHECK.encode())[0]) != text:
        raise UserError(f"{name}: damaged (its digest does not match its content); {_REMEDY}")
    if (answers := values["identity"].get("answers_version")) != ANSWERS_VERSION:
        raise _other_version(name, "answers have version", answers, ANSWERS_VERSION)
    return values


def _other_version(name: str, part: str, found: Any, known: int) -> UserError:
    return UserError(
        f"{name}: the job's {part} {printable(found)[:40]}, but this version of skipdecode reads {known}; use the "
        "version that began the job, or start again with --overwrite"
    )


_FILES = pa.schema(
    [
        *(("url", pa.string()), ("size", pa.int64()), ("version", pa.string())),
        *(("group_rows", pa.list_(pa.int64())), ("group_bytes", pa.list_(pa.int64()))),
        *(("digest", pa.string()), ("format", pa.string())),
    ]
)
_SHARDS = pa.schema([("index", pa.int64()), ("url", pa.string()), ("first_row", pa.int64()), ("rows", pa.int64())])


def _shards(table: pa.Table) -> list[Shard]:
    """Return the shards in plan.pq. To save memory, all shards of a file share one URL string."""
    urls: dict[str, str] = {}
    columns = (table[name].to_pylist() for name in _SHARDS.names)
    return [Shard(index, urls.setdefault(url, url), *rows) for index, url, *rows in zip(*columns, strict=True)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
