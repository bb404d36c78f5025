"""What a job is, settled once and written down: its identity, its shards, and what shapes its batches.

`_job/job.json` and the Parquet files beside it make a resumed job the same job: the file list is pinned, and
so is every value that a batch hangs on. The fingerprint covers all that can change an answer.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from actors.engine.loading import Checkpoint
from actors.engine.schedule import Schedule
from pipeline.config import JobConfig
from pipeline.generate import ANSWER_FIELDS, OPTIONAL_FIELDS
from pipeline.prepare import ERROR, PROMPT_IDS, template_columns
from pipeline.source import InputFile, Shard, cut_shards, list_files, read_footer
from pipeline.storage import Folder, filesystem

log = logging.getLogger(__name__)
JOB, PLAN, INPUTS = "_job/job.json", "_job/plan.parquet", "_job/inputs.parquet"
FORMAT = 1


@dataclass(frozen=True)
class Batching:
    """Values that shape batches, resolved when the job is first planned; bytes and rows."""

    shard_rows: int
    shard_bytes: int
    cache_bytes: int
    max_batch: int
    threads: int


@dataclass(frozen=True)
class Manifest:
    """A planned job."""

    fingerprint: str
    identity: dict[str, Any]
    batching: Batching
    files: list[InputFile]
    shards: list[Shard]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def needed_columns(config: JobConfig) -> list[str]:
    """Input columns that the job reads, each once. ValueError if the template does not parse."""
    try:
        prompt = (
            template_columns(config.input.template) if config.input.template is not None else [prompt_column(config)]
        )
    except ValueError as error:
        raise ValueError(f"input.template: {error}") from None
    wanted = [config.input.id, *prompt, *config.output.keep]
    return list(dict.fromkeys(name for name in wanted if name is not None))


def prompt_column(config: JobConfig) -> str:
    """The prompt column of a job without a template."""
    return config.input.prompt or "prompt"


def check_columns(config: JobConfig) -> None:
    """ValueError if columns carried along would collide with the answers' own."""
    for name in needed_columns(config):
        if name in (PROMPT_IDS, ERROR) and name not in config.output.keep:
            raise ValueError(f"input: column {name} has a name that the job uses itself; rename it")
    for name in config.output.keep:
        if config.output.keep.count(name) > 1:
            raise ValueError(f"output.keep: {name} is there twice; leave one out")
    answers = {field.name for field in [*ANSWER_FIELDS, *OPTIONAL_FIELDS.values()]}
    for name in config.output.keep:
        if name in answers or name in (PROMPT_IDS, ERROR):
            raise ValueError(
                f"output.keep: {name} is the name of an answer's column; leave it out or rename the input's"
            )
        if name == "id" and config.input.id != "id":
            raise ValueError("output.keep: id is made by the job; set input.id: id to carry the input's along")


def plan_job(
    config: JobConfig, checkpoint: Checkpoint, schedule: Schedule, limit: int | None, stored: Manifest | None
) -> Manifest:
    """Plan a new job, or the continuation of a stored one: with its pinned files and its batching.

    Raises ValueError of one line for input that is missing, unreadable, of the wrong type, or has changed
    since the stored job began.
    """
    listed = list_files(config.input.path, config.storage)
    _check_apart(config, listed)
    if stored is None:
        files = _footers(config, listed)
        rows = sum(file.rows for file in files)
        if rows == 0:
            raise ValueError(f"{config.input.path[0]}: no rows in {len(files)} files")
        batching = _batching(config, min(rows, limit or rows))
        shards = _limited(cut_shards(files, batching.shard_rows, batching.shard_bytes), limit)
    else:
        files, batching, shards = stored.files, stored.batching, stored.shards
        _check_pinned(files, listed)
        for name in ("cache_bytes", "max_batch", "threads"):
            asked, planned = getattr(config.actors, name), getattr(batching, name)
            if asked not in (None, planned):
                log.warning("actors.%s = %s is left aside: this job was planned with %s", name, asked, planned)
    identity = _identity(config, checkpoint, schedule, files, batching, limit)
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Manifest(fingerprint, identity, batching, files, shards)


def difference(stored: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted names of the values in which two identities differ."""
    found: list[str] = []
    for key in sorted({*stored, *now}):
        old, new = stored.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += difference(old, new, f"{path}{key}.")
        elif old != new:
            found.append(f"{path}{key}")
    return found


def save(folder: Folder, manifest: Manifest) -> None:
    """Write the manifest; `job.json` last, so that it vouches for the rest."""
    folder.replace(INPUTS, _parquet([asdict(file) for file in manifest.files], _FILES))
    folder.replace(PLAN, _parquet([asdict(shard) for shard in manifest.shards], _SHARDS))
    values = {
        "format": FORMAT,
        "fingerprint": manifest.fingerprint,
        "identity": manifest.identity,
        "batching": asdict(manifest.batching),
    }
    folder.replace(JOB, (json.dumps(values, indent=2) + "\n").encode())


def load(folder: Folder) -> Manifest | None:
    """The manifest in an output folder, None if it has none. ValueError if it cannot be read."""
    try:
        text = folder.read(JOB)
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, this version writes {FORMAT}")
        files = [
            InputFile(row["url"], row["size"], row["version"], tuple(row["group_rows"]), tuple(row["group_bytes"]))
            for row in pq.read_table(io.BytesIO(folder.read(INPUTS))).to_pylist()
        ]
        shards = [Shard(**row) for row in pq.read_table(io.BytesIO(folder.read(PLAN))).to_pylist()]
        return Manifest(values["fingerprint"], values["identity"], Batching(**values["batching"]), files, shards)
    except (ValueError, KeyError, TypeError, FileNotFoundError, pa.ArrowException) as error:
        raise ValueError(f"{folder.url}/{JOB}: not a job of this version: {' '.join(str(error).split())}") from None


def _footers(config: JobConfig, listed: Mapping[str, tuple[int, str]]) -> list[InputFile]:
    files: list[InputFile] = []
    columns = needed_columns(config)
    types: dict[str, tuple[pa.DataType, str]] = {}
    for url, (size, file_version) in listed.items():
        file, schema = read_footer(url, size, file_version, config.storage)
        files.append(file)
        for name in columns:
            if name not in schema.names:
                raise ValueError(f"{url}: no column {name!r}; it has {', '.join(schema.names)}")
            kind = schema.field(name).type
            first, where = types.setdefault(name, (kind, url))
            if kind != first:
                raise ValueError(f"{url}: column {name!r} is {kind}, but {first} in {where}")
        if config.input.template is None:
            kind = types[prompt_column(config)][0]
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"{url}: column {prompt_column(config)!r} is {kind}; a prompt must be string")
    return files


def _check_apart(config: JobConfig, listed: Mapping[str, Any]) -> None:
    fs, path = filesystem(config.output.path, config.storage)
    output = path if isinstance(fs, LocalFileSystem) else f"s3://{path}"
    for url in listed:
        if url.startswith(f"{output}/"):
            raise ValueError(f"output.path: {config.output.path} holds the input file {url}; choose another folder")
    for given in config.input.path:
        inputs, folder = filesystem(given, config.storage)
        if isinstance(inputs, LocalFileSystem) == isinstance(fs, LocalFileSystem) and f"{path}/".startswith(
            f"{folder}/"
        ):
            raise ValueError(
                f"output.path: {config.output.path} lies in the input folder {given}; choose another folder"
            )


def _check_pinned(pinned: Sequence[InputFile], listed: Mapping[str, tuple[int, str]]) -> None:
    for file in pinned:
        if file.url not in listed:
            raise ValueError(f"{file.url}: gone since the job began; put it back, or start anew with --overwrite")
        if listed[file.url] != (file.size, file.version):
            raise ValueError(
                f"{file.url}: changed since the job began ({file.size} bytes then, {listed[file.url][0]} now); "
                "put it back, or start anew with --overwrite"
            )
    new = sorted(set(listed) - {file.url for file in pinned})
    if new:
        log.warning("%d input files are newer than the job and left for another run, the first: %s", len(new), new[0])


def _identity(
    config: JobConfig,
    checkpoint: Checkpoint,
    schedule: Schedule,
    files: Sequence[InputFile],
    batching: Batching,
    limit: int | None,
) -> dict[str, Any]:
    inputs = hashlib.sha256()
    for file in files:
        inputs.update(f"{file.url}\0{file.size}\0{file.version}\n".encode())
    return {
        "input": {**config.input.model_dump(), "files": inputs.hexdigest()},
        "output": config.output.model_dump(exclude={"path"}),
        "model": {**config.model.model_dump(exclude={"path"}), "files": _digests(checkpoint.path)},
        "schedule": {"speedup": schedule.speedup, **schedule.to_dict()},
        "sampling": config.sampling.model_dump(),
        "shard_rows": config.shard_rows or batching.shard_rows,
        "shard_bytes": config.shard_bytes,
        "limit": limit,
        "version": version("skipdecode"),
    }


def _digests(folder: Path) -> dict[str, str]:
    digests: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt"):
            with open(path, "rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _batching(config: JobConfig, rows: int) -> Batching:
    actors = config.actors
    cores = os.cpu_count() or 1
    if actors.gpus:
        cache = int(8 * 2**30 * min(actors.gpus, 1))
    else:
        cache = min(2**30, int(psutil.virtual_memory().total / 4 / actors.most))
    return Batching(
        shard_rows=config.shard_rows or min(4096, math.ceil(rows / (4 * actors.most))),
        shard_bytes=config.shard_bytes,
        cache_bytes=actors.cache_bytes or cache,
        max_batch=actors.max_batch,
        threads=actors.threads or (1 if actors.gpus else max(1, cores // actors.most)),
    )


def _limited(shards: Sequence[Shard], limit: int | None) -> list[Shard]:
    if limit is None:
        return list(shards)
    kept: list[Shard] = []
    for shard in shards:
        if limit <= 0:
            break
        kept.append(Shard(shard.index, shard.url, shard.first_row, min(shard.rows, limit)))
        limit -= shard.rows
    return kept


_FILES = pa.schema(
    [
        ("url", pa.string()),
        ("size", pa.int64()),
        ("version", pa.string()),
        ("group_rows", pa.list_(pa.int64())),
        ("group_bytes", pa.list_(pa.int64())),
    ]
)
_SHARDS = pa.schema([("index", pa.int64()), ("url", pa.string()), ("first_row", pa.int64()), ("rows", pa.int64())])


def _parquet(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data
