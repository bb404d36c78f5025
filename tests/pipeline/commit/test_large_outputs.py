"""Resume, end and plan of a job of very many shards: how many requests they cost, how much processor
time and memory."""

from __future__ import annotations

import hashlib
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_server import requests
from bucket_server import seconds as of_store
from memory_probe import watch_peak
from moto.s3.models import s3_backends
from part_builders import FINGERPRINT, LAYERS, part_stats

from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.commit.finalize import finalize
from pipeline.commit.records import RECORDS_SCHEMA, commit_record, encode_record, record_name, write_segment
from pipeline.commit.sink import committed_shards, part_name
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.shards import Shard, group_shards
from pipeline.plan.batching import Batching
from pipeline.plan.manifest import ANSWERS_VERSION, Manifest, plan_job
from pipeline.plan.plan_files import load, save
from pipeline.storage.folder import open_folder

GIB = 2**30
PART = b"x"
TAG = hashlib.md5(PART).hexdigest()  # the ETag of a part
ROWS = 4000  # of a shard; 250,000 of them are 10^9


def planned(count: int, files: int = 200) -> Manifest:
    """A job of `count` shards in some files."""
    each = -(-count // files)
    inputs = [
        InputFile(f"s3://bucket/in/{number:05d}.parquet", 10**9, "v", (ROWS,) * each, (10**6,) * each)
        for number in range(files)
    ]
    shards = [Shard(index, inputs[index // each].url, index % each * ROWS, ROWS) for index in range(count)]
    identity = {"schedule": {"speedup": 2.0, "num_layers": LAYERS}, "answers_version": ANSWERS_VERSION}
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
        one = commit_record(PART, part_stats(manifest.shards[0]), TAG)
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
            self.create(
                record_name(shard.index), encode_record(commit_record(PART, part_stats(shard), TAG), FINGERPRINT)
            )


def resume(s3: StorageConfig, shards: int, loose: int) -> None:
    """The last 50 shards are open, a few records are loose, one part in a full segment has lost its record."""
    name = f"large/{uuid.uuid4().hex}"
    folder, bucket, manifest = open_folder(f"s3://bucket/{name}", s3), Bucket(name), planned(shards)
    bucket.fill(manifest, shards - 50, loose)
    save(folder, manifest)
    peak = watch_peak()  # the store lives in this process
    began = time.process_time()
    requests.clear()
    of_store.clear()
    stored = load(folder)
    assert stored is not None
    done = committed_shards(folder, stored.shards, FINGERPRINT)
    seconds, asked = time.process_time() - began, len(requests)
    assert done == set(range(shards - 50))
    print(f"\nresume of {shards:,}: {seconds:.1f} s, of these moto {sum(of_store):.1f}, {asked} requests")
    assert seconds - sum(of_store) < 40
    segments = -(-(shards - 50 - loose) // 1000)
    # plan, one page each of names of segments and records, their content, and a page of names for a thousand parts
    assert segments < asked <= 4 + 2 + segments + loose + -(-loose // 1000) + -(-shards // 1000) + 3
    for shard in manifest.shards[shards - 50 :]:
        bucket.create(part_name(shard.index), PART)
        bucket.create(record_name(shard.index), encode_record(commit_record(PART, part_stats(shard), TAG), FINGERPRINT))
    began = time.process_time()
    requests.clear()
    of_store.clear()
    totals = finalize(folder, manifest)
    seconds, own, asked = time.process_time() - began, peak() / GIB, len(requests)
    print(f"its end: {seconds:.1f} s, of these moto {sum(of_store):.1f}, {asked} requests, {own:.2f} GiB more")
    assert seconds - sum(of_store) < 40 and own < 2
    assert totals.rows == manifest.rows
    # a read of each loose record and segment, a page of names for a thousand parts, and what is written
    assert segments < asked <= loose + 50 + segments + -(-shards // 1000) + 8


def test_a_resume_reads_segments_and_not_every_record(s3: StorageConfig) -> None:
    resume(s3, 4_000, 100)


@pytest.mark.slow
def test_a_resume_of_a_thousand_million_rows(s3: StorageConfig) -> None:
    resume(s3, 250_000, 900)


def plan(inputs: Path, output: Path, checkpoint: Path, files: int, shards: int) -> None:
    """Files of 4,000 rows a row group, shards of a row group each."""
    each = shards // files
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int8()), ["hello"]).cast(pa.string())
    inputs.mkdir()
    with pq.ParquetWriter(inputs / "00000.parquet", pa.schema([("prompt", pa.string())])) as writer:
        for _ in range(each):
            writer.write_table(pa.table({"prompt": prompts}))
    for number in range(1, files):
        (inputs / f"{number:05d}.parquet").write_bytes((inputs / "00000.parquet").read_bytes())
    values = {"input": {"path": str(inputs)}, "output": {"path": str(output)}, "model": {"path": str(checkpoint)}}
    config = JobConfig.model_validate({**values, "shard_rows": 4000})
    resolved = resolve_checkpoint(config.model, config.storage)
    schedule = resolved.checkpoint.schedule(config.schedule.changes())
    folder = open_folder(str(output), config.storage)
    began, peak = time.process_time(), watch_peak()
    manifest = plan_job(config, resolved, schedule, None, None)
    save(folder, manifest)
    planned_in = time.process_time() - began
    stored = load(folder)
    assert stored == manifest and len(manifest.shards) == shards and manifest.rows == 4000 * shards
    tasks = group_shards(manifest.shards, manifest.files, 50_000, 2**29)
    again = plan_job(config, resolved, schedule, None, stored)
    assert again.fingerprint == manifest.fingerprint and sum(map(len, tasks)) == shards
    seconds, own = time.process_time() - began, peak() / GIB
    print(f"\nplan of {shards:,} shards: {planned_in:.1f} s; with reading it {seconds:.1f} s, {own:.2f} GiB more")
    assert planned_in < 60 and own < 2


def test_a_plan_of_many_shards(checkpoint: Path, tmp_path: Path) -> None:
    plan(tmp_path / "in", tmp_path / "out", checkpoint, 200, 10_000)


@pytest.mark.slow
def test_a_plan_of_a_thousand_million_rows(checkpoint: Path, tmp_path: Path) -> None:
    plan(tmp_path / "in", tmp_path / "out", checkpoint, 10_000, 250_000)
