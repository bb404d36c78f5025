"""Reads all output files (parts) of a job again, and compares them with the commit records, the plan and the input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from actors.engine.errors import UserError
from pipeline.commit.records import damaged_record, read_all, record_name
from pipeline.commit.results import result_problems
from pipeline.commit.sink import PARTS_AT_ONCE, REPAIR, SUCCESS, check_part, part_files, part_name
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile, check_unchanged
from pipeline.input.rows import read_layout
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest, coverage_problems
from pipeline.plan.plan_files import PLAN
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.errors import NoSuchBucket
from pipeline.storage.folder import Folder


def verify(folder: Folder, manifest: Manifest, storage: StorageConfig) -> Iterator[str]:
    """Yield one line for each file that differs from its commit record or from the plan. Write nothing."""
    yield from (
        f"{folder.url}/{PLAN}: {problem}; start again with --overwrite" for problem in plan_problems(manifest, storage)
    )
    records, damaged = read_all(folder, manifest.fingerprint)
    yield from (damaged_record(folder, name) for name in damaged)
    digests = dict(zip(records["shard"].to_pylist(), records["sha256"].to_pylist(), strict=True))
    planned = {shard.index: shard for shard in manifest.shards}
    parts = part_files(folder, planned)

    def part_problem(index: int) -> str | None:
        name = f"{folder.url}/{part_name(index)}"
        if index not in planned:
            name = name if index in parts else f"{folder.url}/{record_name(index)}"
            return f"{name}: belongs to no shard of this job; delete it"
        if index not in parts:
            return f"{name}: was committed and is gone; run the job again to write it"
        try:
            part = folder.read(part_name(index))
            check_part(folder, planned[index], part, manifest.fingerprint)
        except FileNotFoundError:
            return f"{name}: removed by another program while it was read"
        except ValueError as error:
            return str(error)
        if index not in digests:
            return f"{name}: has no commit record; run the job again to rebuild it"
        if hashlib.sha256(part).hexdigest() != digests[index]:
            return f"{name}: valid, but differs from the file that was committed (sha256); {REPAIR}"
        return None

    expected = planned.keys() if folder.exists(SUCCESS) else set()
    yield from result_problems(folder)
    shards = sorted(parts.keys() | digests.keys() | expected)
    yield from (line for line in in_parallel(part_problem, shards, PARTS_AT_ONCE) if line is not None)


def plan_problems(manifest: Manifest, storage: StorageConfig) -> list[str]:
    """Return one line per problem: shards that overlap or leave a gap, and input files whose rows are not as planned.

    Skip input files that were removed or changed after planning, because the answers belong to the old content.
    """

    def problem(file: InputFile) -> str | None:
        try:
            check_unchanged(file, storage)
            found, _ = read_layout(file.url, file.size, file.version, storage, file.format)
        except (UserError, PermissionError, NoSuchBucket):
            return None
        same = found.group_rows == file.group_rows
        return None if same else f"{file.url}: it holds {counted(found.rows, 'row')}, but the plan says {file.rows}"

    lines = [line for line in in_parallel(problem, manifest.files) if line is not None]
    return [*lines, *coverage_problems(manifest)]
