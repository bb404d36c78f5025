"""Resume, end and plan of a job of very many shards: how many requests they cost, how long, how much memory."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from large_output import PART, Bucket, counted, planned
from memory_probe import watch_peak
from part_builders import FINGERPRINT, part_stats

from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.commit.finalize import finalize
from pipeline.commit.records import commit_record, encode_record, record_name
from pipeline.commit.sink import committed_shards, part_name
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.shards import group_shards
from pipeline.plan.manifest import plan_job
from pipeline.plan.plan_files import load, save
from pipeline.storage.folder import open_folder

GIB = 2**30


def resume(s3: StorageConfig, shards: int, loose: int) -> None:
    """The last 50 shards are open, a few records are loose, one part in a full segment has lost its record."""
    name = f"large/{uuid.uuid4().hex}"
    folder, bucket, manifest = open_folder(f"s3://bucket/{name}", s3), Bucket(name), planned(shards)
    bucket.fill(manifest, shards - 50, loose)
    save(folder, manifest)
    peak = watch_peak()  # the store lives in this process
    began = time.monotonic()
    with counted() as seen:
        stored = load(folder)
        assert stored is not None
        done = committed_shards(folder, stored.shards, FINGERPRINT)
    seconds = time.monotonic() - began
    assert done == set(range(shards - 50))
    print(f"\nresume of {shards:,}: {seconds:.1f} s, {len(seen)} requests")
    assert seconds < 60
    segments = -(-(shards - 50 - loose) // 1000)
    # plan, one page each of names of segments and records, their content, and a page of names for a thousand parts
    assert len(seen) <= 4 + 2 + segments + loose + -(-loose // 1000) + -(-shards // 1000) + 3
    for shard in manifest.shards[shards - 50 :]:
        bucket.create(part_name(shard.index), PART)
        bucket.create(record_name(shard.index), encode_record(commit_record(PART, part_stats(shard)), FINGERPRINT))
    began = time.monotonic()
    with counted() as seen:
        totals = finalize(folder, manifest)
    own = peak() / GIB
    print(f"its end: {time.monotonic() - began:.1f} s, {len(seen)} requests, {own:.2f} GiB more")
    assert own < 2
    assert totals.rows == manifest.rows
    # a read of each loose record and segment, a page of names for a thousand parts, and what is written
    assert len(seen) <= loose + 50 + segments + -(-shards // 1000) + 8


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
    began, peak = time.monotonic(), watch_peak()
    manifest = plan_job(config, resolved, schedule, None, None)
    save(folder, manifest)
    planned_in = time.monotonic() - began
    stored = load(folder)
    assert stored == manifest and len(manifest.shards) == shards and manifest.rows == 4000 * shards
    tasks = group_shards(manifest.shards, manifest.files, 50_000, 2**29)
    again = plan_job(config, resolved, schedule, None, stored)
    assert again.fingerprint == manifest.fingerprint and sum(map(len, tasks)) == shards
    seconds, own = time.monotonic() - began, peak() / GIB
    print(f"\nplan of {shards:,} shards: {planned_in:.1f} s; with reading it {seconds:.1f} s, {own:.2f} GiB more")
    assert planned_in < 60 and own < 2


def test_a_plan_of_many_shards(checkpoint: Path, tmp_path: Path) -> None:
    plan(tmp_path / "in", tmp_path / "out", checkpoint, 200, 10_000)


@pytest.mark.slow
def test_a_plan_of_a_thousand_million_rows(checkpoint: Path, tmp_path: Path) -> None:
    plan(tmp_path / "in", tmp_path / "out", checkpoint, 10_000, 250_000)
