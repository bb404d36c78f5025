"""Read every part of an output again and compare it with its commit record and with the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from pipeline.commit.records import read_valid_records
from pipeline.commit.sink import PARTS_AT_ONCE, SUCCESS, check_part, part_name, part_sizes
from pipeline.plan.manifest import Manifest
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder


def verify(folder: Folder, manifest: Manifest) -> Iterator[str]:
    """Yield one line for each file that differs from what was committed. Changes nothing."""
    records, problems = read_valid_records(folder, manifest.fingerprint)
    yield from problems
    digests = dict(zip(records["shard"].to_pylist(), records["sha256"].to_pylist(), strict=True))
    planned = {shard.index: shard for shard in manifest.shards}
    parts = part_sizes(folder, planned, max(planned, default=-1))

    def problem(index: int) -> str | None:
        name = f"{folder.url}/{part_name(index)}"
        if index not in planned:
            return f"{name}: belongs to no shard of this job: delete it"
        if index not in parts:
            return f"{name}: committed and gone; run the job again to answer it"
        try:
            part = folder.read(part_name(index))
            check_part(folder, planned[index], part, manifest.fingerprint)
        except FileNotFoundError:
            return f"{name}: gone while it was read"
        except ValueError as error:
            return str(error)
        if index not in digests:
            return f"{name}: has no commit record; run the job again to rebuild it"
        if hashlib.sha256(part).hexdigest() != digests[index]:
            return f"{name}: valid, but not what was committed (sha256 differs); delete it and run again"
        return None

    expected = planned.keys() if folder.exists(SUCCESS) else set()
    shards = sorted(parts.keys() | digests.keys() | expected)
    yield from (line for line in in_parallel(problem, shards, PARTS_AT_ONCE) if line is not None)
