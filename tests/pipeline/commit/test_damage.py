"""A part of an earlier run that is damaged is named by the next run; --repair keeps its bytes and answers its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from in_process import invoke, job_values
from input_files import write_rows

from pipeline.commit.records import SEGMENTS, compact, decode_record, encode_record, record_name
from pipeline.commit.sink import DAMAGED, SUCCESS, part_name
from pipeline.config.job import StorageConfig
from pipeline.plan import plan_files
from pipeline.storage.folder import open_folder

ROWS = 12


class Job:
    """A command whose parts are made up, and its output folder with four parts."""

    def __init__(self, url: str, storage: StorageConfig, checkpoint: Path, folder: Path) -> None:
        self.output, self.folder = open_folder(url, storage), folder
        write_rows(folder / "in.parquet", [ROWS])
        own = {"input": {"id": "id"}, "shard_rows": 3, "storage": storage.model_dump(include={"endpoint_url"})}
        self.values = job_values(folder / "in.parquet", url, checkpoint, **own)
        assert self.run().exit_code == 0
        manifest = plan_files.load(self.output)
        assert manifest is not None
        self.fingerprint = manifest.fingerprint

    def run(self, *options: str) -> Any:
        return invoke(self.folder, self.values, *options)

    def flip(self, shard: int) -> bytes:
        """Flip a bit in the middle of a part. Returns the damaged bytes."""
        data = bytearray(self.output.read(part_name(shard)))
        data[len(data) // 2] ^= 1
        self.output.replace(part_name(shard), bytes(data))
        return bytes(data)


@pytest.fixture
def new_job(checkpoint: Path, tmp_path: Path, made_up_parts: None, s3: StorageConfig) -> Callable[[str], Job]:
    def make(store: str) -> Job:
        url = str(tmp_path / "out") if store == "local" else f"s3://bucket/{uuid4().hex}"
        return Job(url, s3, checkpoint, tmp_path)

    return make


@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_flipped_bit_is_named_and_repaired(store: str, finished: bool, new_job: Callable[[str], Job]) -> None:
    job = new_job(store)
    before = {name: job.output.read(name) for name in job.output.names() if name.startswith("part-")}
    if not finished:
        for name in (SUCCESS, part_name(3), record_name(3)):
            job.output.remove(name)
    damaged = job.flip(1)
    for _ in range(2):
        result = job.run()
        assert result.exit_code == 2 and not job.output.names(DAMAGED), result.output
        assert f"{job.output.url}/part-000001.parquet: damaged" in result.stderr and "--repair" in result.stderr
    result = job.run("--repair", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fresh_rows"] == (3 if finished else 6)
    (kept,) = job.output.names(DAMAGED)
    assert kept.startswith("part-000001-") and job.output.read(f"{DAMAGED}/{kept}") == damaged
    assert {name: job.output.read(name) for name in before} == before
    assert job.run("--verify").exit_code == 0


def test_a_damaged_part_whose_record_is_in_a_segment_or_gone_is_repaired(new_job: Callable[[str], Job]) -> None:
    job = new_job("local")
    compact(job.output, job.fingerprint, least=1)
    job.flip(0)
    assert job.run().exit_code == 2
    assert job.run("--repair").exit_code == 0
    for name in job.output.names(SEGMENTS):
        job.output.remove(f"{SEGMENTS}/{name}")
    job.output.remove(record_name(0))
    job.output.replace(part_name(2), b"PAR1")
    result = job.run()
    assert result.exit_code == 2 and "part-000002.parquet: damaged" in result.stderr and "--repair" in result.stderr
    assert job.run("--repair").exit_code == 0 and len(job.output.names(DAMAGED)) == 2


def test_records_without_the_stores_checksum_are_checked_by_size_and_said(
    new_job: Callable[[str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """As records of earlier versions; --verify reads the parts."""
    job = new_job("s3")
    for shard in range(4):
        record = decode_record(job.output.read(record_name(shard)), shard, job.fingerprint)
        assert record is not None and record["tag"]
        job.output.replace(record_name(shard), encode_record({**record, "tag": ""}, job.fingerprint))
    job.flip(1)
    assert job.run().exit_code == 0 and "4 parts were checked by size alone" in caplog.text
    result = job.run("--verify")
    assert result.exit_code == 2 and "sha256 differs" in result.stderr
    assert job.run("--repair").exit_code == 0 and job.run("--verify").exit_code == 0
    data = job.output.read(part_name(0))
    job.output.replace(part_name(0), data[:-1])
    result = job.run()
    assert result.exit_code == 2 and f"{len(data) - 1:,} bytes, {len(data):,} were committed" in result.stderr
