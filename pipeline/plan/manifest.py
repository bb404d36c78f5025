"""Plans a job: its identity, its input files and shards, and the values that determine its batches.

The identity is everything that can change an answer; its digest is the fingerprint. `plan_files.py` saves the plan, so
that the job can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.input.files import Files, InputFile, file_format, input_root, list_files
from pipeline.input.rows import common_schema, decode, read_layout
from pipeline.input.schema import plain
from pipeline.input.shards import Shard, cut_shards
from pipeline.input.text_files import with_json_fields
from pipeline.messages import counted
from pipeline.plan.batching import Batching, plan_batching
from pipeline.plan.columns import check_type, text_columns
from pipeline.plan.hardware import Hardware
from pipeline.plan.inputs import check_output_disjoint, unchanged_files, with_digests
from pipeline.plan.sample import check_sample
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.runtime.announce import announced
from pipeline.storage.concurrency import in_parallel

log = logging.getLogger(__name__)
ANSWERS_VERSION = 2  # raise this number when a code change gives different answers to the same job file
WITHOUT_EFFECT: Any = {  # sections and keys of a job file that change no answer, or are compared by their values below
    "input": {"since", "changed", "unreadable", "csv_field_bytes"},
    "output": {"path", "format"},
    "model": {"path", "cache", "speed_adapter"},
    **dict.fromkeys(("schedule", "actors", "storage", "adapt", "price_per_hour"), True),
    **dict.fromkeys(("max_error_rate", "grace_seconds", "attempts"), True),
}


class NoRows(UserError):
    """The input files have no rows."""


@dataclass(frozen=True)
class Manifest:
    """A planned job: what it reads, in which shards, and how it batches rows."""

    fingerprint: str  # SHA-256 of the identity
    identity: dict[str, Any]  # everything that can change an answer
    batching: Batching
    files: list[InputFile]  # pinned input files
    shards: list[Shard]  # in order: the index of a shard is its place in the list
    schema: pa.Schema  # columns that the job reads, with the same types for all files

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


def plan_job(
    config: JobConfig,
    resolved: ResolvedCheckpoint,
    schedule: Schedule,
    limit: int | None,
    stored: Manifest | None,
    files: Files | None = None,
    *,
    root: str | None = None,
    hardware: Hardware | None = None,
    preview: bool = False,
) -> Manifest:
    """Plan a new job. If `stored` is given, plan to resume that job, with its pinned files and its batching.

    Args:
        limit: maximum number of input rows; None: all.
        files: input files; default: all files of `input.path`.
        root: folder to which file names in made-up ids are relative; default: the folder that holds all input files.
        hardware: determines threads and cache of a new job; default: the hardware of this process.
        preview: plan only the first `limit` rows. Later rows are not read.

    Raises:
        UserError: input is missing or unreadable, has the wrong type, or has changed since the stored job began; or all
            sampled rows of a new job have an error (unless `files` is given, or `max_error_rate` is at least 0.5).
        NoRows: the input has no rows.
    """
    listed = files if files is not None else list_files(config.input.path, config.storage, config.input.format)
    check_output_disjoint(config, listed)
    if stored is None:
        first = _first_files(config, listed, limit) if preview and limit else listed
        pinned, schema = read_footers(config, first, limit if preview else None)
        rows = sum(file.rows for file in pinned)
        if rows == 0:
            raise NoRows(f"{config.input.path[0]}: no rows in {counted(len(pinned), 'file')}")
        if not preview:
            pinned = with_digests(pinned)
        batching = plan_batching(config, resolved, min(rows, limit or rows), hardware)
        shards = limited(cut_shards(pinned, batching.shard_rows, batching.shard_bytes), limit)
        root = root or input_root(config.input, config.storage, listed)
        batching = replace(batching, planned=float(int(time.time())), root=root)
        # incremental runs go on in spite of a bad file
        if files is None and config.max_error_rate < 0.5 and not preview:
            spec = prompt_spec(config, resolved, batching.planned)
            check_sample(pinned, shards, schema, config.storage, spec, hardware or Hardware())
    else:
        schema, batching, shards = stored.schema, stored.batching, stored.shards
        pinned = unchanged_files(stored.files, listed)
        for name in ("cache_bytes", "max_batch", "threads", "scheduler"):
            asked, planned = getattr(config.actors, name), getattr(batching, name)
            if asked not in (None, planned):
                log.warning("actors.%s = %s is ignored: this job was planned with %s", name, asked, planned)
    # use the stored files: a file rewritten with the same bytes has a new version, but the job stays the same
    identity = _identity(config, resolved, schedule, stored.files if stored else pinned, batching, limit)
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Manifest(fingerprint, identity, batching, pinned, shards, schema)


def _first_files(config: JobConfig, listed: Files, rows: int) -> Files:
    """Return the files that hold the first `rows` rows. Later files are not opened."""
    found: dict[str, tuple[int, str]] = {}
    for url, entry in listed.items():
        found[url] = entry
        rows -= sum(file.rows for file in read_footers(config, {url: entry}, rows)[0])
        if rows <= 0:
            break
    return found


def difference(stored: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the dotted names of the values that differ between two identities."""
    names: list[str] = []
    for key in sorted({*stored, *now}):
        old, new = stored.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += difference(old, new, f"{path}{key}.")
        elif old != new:
            names.append(f"{path}{key}")
    return names


def coverage_problems(manifest: Manifest) -> list[str]:
    """Return a line for each gap, overlap or unknown file. Shards must cover the rows of every file once, in order."""
    rows = {file.url: file.rows for file in manifest.files}
    covered = dict.fromkeys(rows, 0)
    problems = []
    for position, shard in enumerate(manifest.shards):
        name, expected = f"shard {shard.index}", covered.get(shard.url)
        if shard.index != position:
            problems.append(f"{name}: is at position {position} of the plan, not {shard.index}")
        if expected is None:
            problems.append(f"{name}: {shard.url} is not an input file of the job")
            continue
        if shard.first_row != expected:
            problems.append(f"{name}: begins at row {shard.first_row} of {shard.url}; expected row {expected}")
        covered[shard.url] = shard.first_row + shard.rows
        if shard.rows <= 0 or covered[shard.url] > rows[shard.url]:
            problems.append(
                f"{name}: {shard.rows} rows from row {shard.first_row}, but {shard.url} has {rows[shard.url]} rows"
            )
    limit = manifest.identity.get("limit")
    if limit is None:
        problems += [
            f"{url}: rows {end} to {rows[url]} are in no shard" for url, end in covered.items() if end < rows[url]
        ]
    elif manifest.rows != min(limit, sum(rows.values())):
        problems.append(f"the shards hold {manifest.rows} rows, but the job's limit is {limit}")
    return problems


def read_footers(config: JobConfig, listed: Files, limit: int | None = None) -> tuple[list[InputFile], pa.Schema]:
    """Return the pinned files, and a schema with the needed columns of all files. Raises UserError like `plan_job`.

    With `input.unreadable: later`, files that cannot be read are left out, and a warning names each. limit: maximum
    number of rows to read from each text file; None: all.
    """
    text = text_columns(config)

    def layout(url: str) -> list[tuple[InputFile, pa.Schema]]:
        try:
            kind = file_format(url, config.input.format)
            file, schema = read_layout(url, *listed[url], config.storage, kind, text, limit)
            if config.input.unreadable == "later":
                common_schema([(file, schema)], text.names, config.storage)
                if kind == "parquet":  # the data too, so that a file is left whole, never in the middle
                    decode(file, text.names, config.storage)
        except UserError as error:
            if config.input.unreadable != "later":
                raise
            log.warning("input file left for a later run: %s", error)
            return []
        return [(file, schema)]

    with announced("reading Parquet footers, or whole text files, to count rows and find column types"):
        footers = [footer for footers in in_parallel(layout, listed) for footer in footers]
    schemas = {file.url: schema for file, schema in footers}
    schema = with_json_fields(common_schema(footers, text.names, config.storage), text.as_json)
    for url, columns in schemas.items():
        for name in columns.names:
            if name in schema.names and not pa.types.is_null(kind := plain(columns.field(name).type)):
                check_type(config, name, kind, url)
    return [file for file, _ in footers], schema


def _identity(
    config: JobConfig,
    resolved: ResolvedCheckpoint,
    schedule: Schedule,
    files: Sequence[InputFile],
    batching: Batching,
    limit: int | None,
) -> dict[str, Any]:
    inputs = hashlib.sha256()
    for file in files:
        inputs.update(f"{file.url}\0{file.size}\0{file.version}\n".encode())
    sections = config.model_dump(mode="json", exclude=WITHOUT_EFFECT)
    return {
        **sections,
        "input": {**sections["input"], "files": inputs.hexdigest()},
        "model": {**sections["model"], **resolved.identity()},
        "schedule": {"speedup": schedule.speedup, **schedule.to_dict()},
        "shard_rows": config.shard_rows or batching.shard_rows,
        "limit": limit,
        "answers_version": ANSWERS_VERSION,
    }


def limited(shards: Sequence[Shard], limit: int | None) -> list[Shard]:
    """Return the shards that hold the first `limit` rows, and shorten the last one. Without a limit, return all."""
    if limit is None:
        return list(shards)
    kept: list[Shard] = []
    for shard in shards:
        if limit <= 0:
            break
        kept.append(replace(shard, rows=min(shard.rows, limit)))
        limit -= shard.rows
    return kept
