"""An output of very many shards, put straight into a moto server's store: parts of one byte, records in segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.models import s3_backends
from part_builders import FINGERPRINT, LAYERS, part_stats

from pipeline.commit.records import (
    RECORDS_SCHEMA,
    commit_record,
    encode_record,
    record_name,
    write_segment,
)
from pipeline.commit.sink import part_name
from pipeline.input.files import InputFile
from pipeline.input.shards import Shard
from pipeline.plan.batching import Batching
from pipeline.plan.manifest import Manifest

PART = b"x"
ROWS = 4000  # of a shard; 250,000 of them are 10^9


def planned(count: int, files: int = 200) -> Manifest:
    """A job of `count` shards in some files."""
    each = -(-count // files)
    inputs = [
        InputFile(f"s3://bucket/in/{number:05d}.parquet", 10**9, "v", (ROWS,) * each, (10**6,) * each)
        for number in range(files)
    ]
    shards = [Shard(index, inputs[index // each].url, index % each * ROWS, ROWS) for index in range(count)]
    identity = {"schedule": {"speedup": 2.0, "num_layers": LAYERS}}
    return Manifest(FINGERPRINT, identity, Batching(ROWS, 1, 1, 1, 1), inputs, shards, pa.schema([]))


class Bucket:
    """The store behind a moto server in this process."""

    def __init__(self, folder: str) -> None:
        self.backend: Any = s3_backends["123456789012"]["aws"]
        self.folder = folder

    def create(self, name: str, data: bytes) -> None:
        self.backend.put_object("bucket", f"{self.folder}/{name}", data)

    def fill(self, manifest: Manifest, done: int, loose: int, each: int = 1000) -> None:
        """The first `done` shards as a run leaves them: parts, segments, and the last records loose."""
        one = commit_record(PART, part_stats(manifest.shards[0]))
        for index in range(done):
            self.create(part_name(index), PART)
        rolled = done - loose
        for first in range(0, rolled, each):
            count = min(each, rolled - first)
            columns = {name: [value] * count for name, value in one.items()}
            columns["shard"] = list(range(first, first + count))
            table = pa.table(columns, schema=RECORDS_SCHEMA)
            write_segment(self, table, FINGERPRINT)
        for shard in manifest.shards[rolled:done]:
            self.create(record_name(shard.index), encode_record(commit_record(PART, part_stats(shard)), FINGERPRINT))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The requests that moto servers in this process answer meanwhile: method, path and query."""
    seen: list[str] = []
    call = DomainDispatcherApplication.__call__

    def noted(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        seen.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        return call(self, environ, start_response)

    DomainDispatcherApplication.__call__ = noted
    try:
        yield seen
    finally:
        DomainDispatcherApplication.__call__ = call
