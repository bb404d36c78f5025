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
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError
from actors.engine.schedule import Schedule
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.plan.columns import check_type, needed_columns
from pipeline.plan.gpu_memory import planned_cache
from pipeline.plan.memory import Hardware
from pipeline.plan.scheduler_choice import chosen_scheduler
from pipeline.plan.shared_prefix import sampled_prefix
from pipeline.prepare.prompts import prompt_spec
from pipeline.read.files import Files, InputFile, list_files, read_footer
from pipeline.read.schema import one_schema, plain
from pipeline.read.shards import Shard, cut_shards
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, filesystem

log = logging.getLogger(__name__)
JOB, PLAN, INPUTS, SCHEMA = "_job/job.json", "_job/plan.parquet", "_job/inputs.parquet", "_job/schema.arrow"
FORMAT = 2
GPU_CACHE_BYTES = 8 * 2**30  # of a GPU that slots of full length are kept on


class NoRows(UserError):
    """The input files have no rows."""


@dataclass(frozen=True)
class Batching:
    """Values that shape batches, resolved when the job is first planned; bytes and rows.

    prefix: token ids that prompts begin with, computed once an actor; () for none. planned: when the job was,
    seconds since 1970: what its chat template is told is now. scheduler: of actors.engine.scheduler.
    """

    shard_rows: int
    shard_bytes: int
    cache_bytes: int
    max_batch: int
    threads: int
    prefix: tuple[int, ...] = ()
    planned: float = 0.0
    scheduler: str = "lock_step"


@dataclass(frozen=True)
class Manifest:
    """A planned job. schema: of the columns that it reads, one for all files."""

    fingerprint: str
    identity: dict[str, Any]
    batching: Batching
    files: list[InputFile]
    shards: list[Shard]
    schema: pa.Schema

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def plan_job(
    config: JobConfig,
    located: ResolvedCheckpoint,
    schedule: Schedule,
    limit: int | None,
    stored: Manifest | None,
    files: Files | None = None,
    *,
    hardware: Hardware | None = None,
) -> Manifest:
    """Plan a new job, or the continuation of a stored one: with its pinned files and its batching.

    files: what to plan over, in place of all that lies in `input.path`. hardware: asked for the memory of a GPU, where
    a new job's cache depends on it.
    Raises ValueError of one line for input that is missing, unreadable, of the wrong type, or has changed
    since the stored job began; NoRows if there is nothing to answer.
    """
    listed = list_files(config.input.path, config.storage) if files is None else files
    check_output_disjoint(config, listed)
    if stored is None:
        pinned, schema = read_footers(config, listed)
        rows = sum(file.rows for file in pinned)
        if rows == 0:
            raise NoRows(f"{config.input.path[0]}: no rows in {len(pinned)} files")
        batching = _batching(config, located, min(rows, limit or rows), hardware)
        shards = _limited(cut_shards(pinned, batching.shard_rows, batching.shard_bytes), limit)
        batching = replace(batching, planned=float(int(time.time())))
        if config.shared_prefix:
            spec = prompt_spec(config, located, batching.planned)
            prefix = sampled_prefix(shards, schema, config.storage, spec)
            batching = replace(batching, prefix=tuple(prefix))
    else:
        pinned, schema, batching, shards = stored.files, stored.schema, stored.batching, stored.shards
        check_inputs_unchanged(pinned, listed)
        for name in ("cache_bytes", "max_batch", "threads", "scheduler"):
            asked, planned = getattr(config.actors, name), getattr(batching, name)
            if asked not in (None, planned):
                log.warning("actors.%s = %s is left aside: this job was planned with %s", name, asked, planned)
    identity = _identity(config, located, schedule, pinned, batching, limit)
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Manifest(fingerprint, identity, batching, pinned, shards, schema)


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
    folder.replace(INPUTS, _parquet(pa.Table.from_pylist([asdict(file) for file in manifest.files], schema=_FILES)))
    columns = {name: [getattr(shard, name) for shard in manifest.shards] for name in _SHARDS.names}
    folder.replace(PLAN, _parquet(pa.table(columns, schema=_SHARDS)))
    folder.replace(SCHEMA, manifest.schema.serialize().to_pybytes())
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
            raise UserError(f"format {values['format']}, this version writes {FORMAT}")
        files = [
            InputFile(row["url"], row["size"], row["version"], tuple(row["group_rows"]), tuple(row["group_bytes"]))
            for row in pq.read_table(io.BytesIO(folder.read(INPUTS))).to_pylist()
        ]
        shards = _shards(pq.read_table(io.BytesIO(folder.read(PLAN)), schema=_SHARDS))
        schema = pa.ipc.read_schema(pa.py_buffer(folder.read(SCHEMA)))
        batching = Batching(**{**values["batching"], "prefix": tuple(values["batching"]["prefix"])})
        return Manifest(values["fingerprint"], values["identity"], batching, files, shards, schema)
    except (ValueError, KeyError, TypeError, FileNotFoundError, pa.ArrowException) as error:
        raise UserError(
            f"{folder.url}/{JOB}: not a job of this version: {' '.join(str(error).split())}; --overwrite starts anew"
        ) from None


def read_footers(config: JobConfig, listed: Files) -> tuple[list[InputFile], pa.Schema]:
    """Every file as it is pinned, and one schema of the needed columns for all. ValueError as for `plan_job`."""
    read = list(in_parallel(lambda url: read_footer(url, *listed[url], config.storage), listed))
    files = [file for file, _ in read]
    schemas = {file.url: schema for file, schema in read}
    schema = one_schema(needed_columns(config), schemas)
    for url, one in schemas.items():
        for name in schema.names:
            kind = plain(one.field(name).type)
            if not pa.types.is_null(kind):
                check_type(config, name, kind, url)
    return files, schema


def check_output_disjoint(
    config: JobConfig, listed: Mapping[str, Any], key: str = "output.path", output: str = ""
) -> None:
    """ValueError if `output`, or the job's own, would hold input files or become one; `key` names it."""
    shown = output or config.output.path
    fs, path = filesystem(shown, config.storage)
    folder_url = path if isinstance(fs, LocalFileSystem) else f"s3://{path}"
    for url in listed:
        if url.startswith(f"{folder_url}/"):
            raise UserError(f"{key}: {shown} holds the input file {url}; choose another folder")
    for given in config.input.path:
        inputs, folder = filesystem(given, config.storage)
        if isinstance(inputs, LocalFileSystem) == isinstance(fs, LocalFileSystem) and f"{path}/".startswith(
            f"{folder}/"
        ):
            raise UserError(f"{key}: {shown} lies in the input folder {given}; choose another folder")


def check_inputs_unchanged(pinned: Sequence[InputFile], listed: Files) -> None:
    """ValueError names a pinned file that is gone or has changed; a warning counts the files that are not pinned."""
    for file in pinned:
        if file.url not in listed:
            raise UserError(f"{file.url}: gone since the job began; put it back, or start anew with --overwrite")
        if listed[file.url] != (file.size, file.version):
            raise UserError(
                f"{file.url}: changed since the job began ({file.size} bytes then, {listed[file.url][0]} now); "
                "put it back, or start anew with --overwrite"
            )
    new = sorted(set(listed) - {file.url for file in pinned})
    if new:
        log.warning("%d input files are newer than the job and left for another run, the first: %s", len(new), new[0])


def _identity(
    config: JobConfig,
    located: ResolvedCheckpoint,
    schedule: Schedule,
    files: Sequence[InputFile],
    batching: Batching,
    limit: int | None,
) -> dict[str, Any]:
    inputs = hashlib.sha256()
    for file in files:
        inputs.update(f"{file.url}\0{file.size}\0{file.version}\n".encode())
    return {
        "input": {**config.input.model_dump(mode="json", exclude={"since", "changed"}), "files": inputs.hexdigest()},
        "output": config.output.model_dump(exclude={"path"}),
        "model": {**config.model.model_dump(exclude={"path", "cache"}), **located.identity()},
        "schedule": {"speedup": schedule.speedup, **schedule.to_dict()},
        "sampling": config.sampling.model_dump(mode="json"),
        "choices": config.model_dump(mode="json")["choices"],
        "shared_prefix": config.shared_prefix,
        "shard_rows": config.shard_rows or batching.shard_rows,
        "shard_bytes": config.shard_bytes,
        "limit": limit,
        "version": version("skipdecode"),
    }


def _batching(config: JobConfig, located: ResolvedCheckpoint, rows: int, hardware: Hardware | None) -> Batching:
    actors = config.actors
    cores = os.cpu_count() or 1
    if config.paged and located.checkpoint.has_pages and actors.cache_bytes is None:
        assert hardware is not None
        cache = planned_cache(config, located, hardware)
    elif actors.gpus:
        cache = int(GPU_CACHE_BYTES * min(actors.gpus, 1))
    else:
        cache = min(2**30, int(psutil.virtual_memory().total / 4 / actors.most))
    return Batching(
        shard_rows=config.shard_rows or min(4096, math.ceil(rows / (4 * actors.most))),
        shard_bytes=config.shard_bytes,
        cache_bytes=actors.cache_bytes or cache,
        max_batch=config.rows_in_flight(located.checkpoint.has_pages),
        threads=actors.threads or (1 if actors.gpus else max(1, cores // actors.most)),
        scheduler=chosen_scheduler(config, located.checkpoint),
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


def _shards(table: pa.Table) -> list[Shard]:
    """Shards of a plan; those of one file hold one string, its URL."""
    urls: dict[str, str] = {}
    indices, files, firsts, rows = (table[name].to_pylist() for name in ("index", "url", "first_row", "rows"))
    shared = [urls.setdefault(url, url) for url in files]
    return [Shard(*values) for values in zip(indices, shared, firsts, rows, strict=True)]


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data
