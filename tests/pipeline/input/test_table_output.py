"""The parts of a finished job as one snapshot of a table: once, whatever dies or runs beside it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from in_process import run_in_process
from part_builders import part, part_stats
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from ray_free_run import MadeUpParts
from table_stores import IcebergTables, Tables, bucket_tables, config, prompts, with_output
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.cli.app import app
from pipeline.commit import table as commit_tables
from pipeline.commit.sink import commit
from pipeline.commit.table import RECORD, commit_table, recorded
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.delta import DeltaOutput
from pipeline.input.iceberg import IcebergOutput
from pipeline.input.shards import Shard
from pipeline.input.table import output_table
from pipeline.plan import plan_files
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import Folder, open_folder
from pipeline.storage.parquet import parquet_bytes

NAME = "out.answers"
OUTPUTS = {"iceberg": IcebergOutput, "delta": DeltaOutput}


def job_into(tables: Tables, checkpoint: Path, tmp_path: Path, run: str = "run 1", rows: int = 6) -> JobConfig:
    """A job over a file of its own, whose answers go into the table; a part has two rows."""
    pq.write_table(prompts(0, rows), tmp_path / f"{run}.parquet")
    output = {"path": f"{tables.root}/out/answers/{run}", "format": tables.kind, "table": tables.path(NAME)}
    return config(tables, checkpoint, input={"path": str(tmp_path / f"{run}.parquet"), "id": "id"}, output=output)


def made_up(job: JobConfig, **options: Any) -> int:
    """Run the job with parts that no model made; the number of fresh rows."""
    return jobs.run(job, backend=MadeUpParts(), **options).fresh_rows


def folder_of(job: JobConfig) -> Folder:
    return open_folder(job.output.path, job.storage)


def part_rows(*configs: JobConfig) -> list[tuple[str, str | None]]:
    """Ids and answers of the jobs' parts, read one by one: the oracle of a table."""
    found = []
    for job in configs:
        folder = folder_of(job)
        for name in folder.names():
            if name.startswith("part-"):
                found += _pairs(pq.read_table(io.BytesIO(folder.read(name))))
    return sorted(found, key=str)


def table_rows(tables: Tables) -> list[tuple[str, str | None]]:
    return sorted(_pairs(tables.rows(NAME)), key=str)


def _pairs(table: pa.Table) -> list[tuple[str, str | None]]:
    return list(zip(table["id"].to_pylist(), table["generated_text"].to_pylist(), strict=True))


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_real_answers_from_a_table_in_a_bucket_into_another(
    kind: str, checkpoint: Path, tmp_path: Path, s3: StorageConfig
) -> None:
    in_bucket = bucket_tables(kind, tmp_path, s3)
    in_bucket.append("in.prompts", prompts(0, 3))
    in_bucket.append("in.prompts", prompts(3, 2))
    source = {"path": in_bucket.path("in.prompts"), "format": in_bucket.kind, "id": "id"}
    output = {"path": f"{in_bucket.root}/out/answers/run-1", "format": in_bucket.kind, "table": in_bucket.path(NAME)}
    job = config(in_bucket, checkpoint, input=source, output={**output, "keep": ["prompt"]})
    assert run_in_process(job).totals.rows == 5
    table = in_bucket.rows(NAME)
    expected = {(f"r{row}", prompts(row, 1)["prompt"][0].as_py()) for row in range(5)}
    assert set(zip(table["id"].to_pylist(), table["prompt"].to_pylist(), strict=True)) == expected
    assert table_rows(in_bucket) == part_rows(job) and table["generated_text"].null_count == 0
    snapshots = in_bucket.snapshots(NAME)
    assert len(snapshots) == 1
    assert run_in_process(job).fresh_rows == 0 and in_bucket.snapshots(NAME) == snapshots


def test_a_finished_job_is_one_snapshot_and_a_second_job_one_more(
    tables: Tables, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the table is asked for later; run again, or in another folder, the job adds nothing, and says so."""
    first, second = (job_into(tables, checkpoint, tmp_path, run) for run in ("run 1", "run%2"))
    plain = with_output(first, format=None, table=None)
    assert made_up(plain) == 6
    assert made_up(first) == 0  # it gets the parts without answering again
    (snapshot,) = tables.snapshots(NAME)
    (record,) = recorded(folder_of(first)).values()
    assert (record.table, record.snapshot) == (tables.path(NAME), snapshot)
    assert made_up(with_output(first, path=f"{tables.root}/out/answers/elsewhere")) == 6
    assert f"nothing is added, because snapshot {snapshot} added this job's answers from another" in caplog.text
    assert tables.snapshots(NAME) == [snapshot] and table_rows(tables) == part_rows(first)
    assert made_up(second) == 6 and len(tables.snapshots(NAME)) == 2
    assert table_rows(tables) == part_rows(first, second)
    monkeypatch.setattr(commit_tables, "output_table", None)  # a finished job asks no catalog
    assert made_up(first) == made_up(plain) == 0


@pytest.mark.parametrize("moment", ["before the snapshot", "after the snapshot", "before _SUCCESS"])
def test_killed_around_the_commit_it_adds_its_parts_once(
    tables: Tables, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    job = job_into(tables, checkpoint, tmp_path)

    append = OUTPUTS[tables.kind].append

    def dies(*args: Any) -> Any:
        if moment == "after the snapshot":
            append(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "before _SUCCESS":
            patch.setattr(jobs, "write_success", dies)
        else:
            patch.setattr(OUTPUTS[tables.kind], "append", dies)
        with pytest.raises(KeyboardInterrupt):
            made_up(job)
    assert not folder_of(job).exists("_SUCCESS")
    with pytest.raises(UserError, match="its parts are data files of table"):
        made_up(job, overwrite=True)
    assert made_up(job) == 0 and folder_of(job).exists("_SUCCESS")
    assert len(tables.snapshots(NAME)) == 1 and table_rows(tables) == part_rows(job)


def test_other_writers_between_reading_and_committing(
    tables: Tables, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that sleeps through its own replacement adds nothing; another job's commit costs nothing."""
    first = job_into(tables, checkpoint, tmp_path, "first", rows=1)
    job, other = job_into(tables, checkpoint, tmp_path), job_into(tables, checkpoint, tmp_path, "other", rows=3)
    assert made_up(first) == 1
    output = OUTPUTS[tables.kind]
    append, check = output.append, output._check_table
    meanwhile = [
        lambda: commit_table(folder_of(job), loaded(job), job),  # while `other` commits, while `job` commits
        lambda: made_up(other),
    ]
    committing = False

    def watched(self: Any, *args: Any) -> int:
        nonlocal committing
        committing = True
        return append(self, *args)

    def overtaken(self: Any, *args: Any) -> None:
        check(self, *args)  # the table is read by now, and not yet committed
        if committing and meanwhile:
            meanwhile.pop()()

    monkeypatch.setattr(output, "append", watched)
    monkeypatch.setattr(output, "_check_table", overtaken)
    assert made_up(job) == 6 and not meanwhile
    assert len(tables.snapshots(NAME)) == 3
    assert table_rows(tables) == part_rows(first, job, other)


def loaded(job: JobConfig) -> Manifest:
    manifest = plan_files.load(folder_of(job))
    assert manifest is not None
    return manifest


def test_appends_of_one_job_at_once_are_one_snapshot(tables: Tables, checkpoint: Path, tmp_path: Path) -> None:
    wanted = job_into(tables, checkpoint, tmp_path)
    assert made_up(with_output(wanted, format=None, table=None)) == 6
    barrier = threading.Barrier(4)

    def run(_: int) -> None:
        barrier.wait()
        commit_table(folder_of(wanted), loaded(wanted), wanted)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert len(tables.snapshots(NAME)) == 1 and table_rows(tables) == part_rows(wanted)


def test_a_lost_part_that_is_answered_with_other_bytes_is_named(
    tables: Tables, checkpoint: Path, tmp_path: Path
) -> None:
    job = job_into(tables, checkpoint, tmp_path)
    made_up(job)
    path = Path(job.output.path) / "part-000001.parquet"
    data = path.read_bytes()
    path.unlink()
    assert made_up(job) == 2 and path.read_bytes() == data  # the same bytes: nothing to do
    path.unlink()

    def longer(shards: Sequence[Shard], folder: Folder, fingerprint: str) -> None:
        for shard in shards:
            table = pq.read_table(io.BytesIO(part(shard, fingerprint=fingerprint)))
            commit(folder, shard, parquet_bytes(table, compression="none"), part_stats(shard), fingerprint)

    with pytest.raises(UserError, match=r"holds parts of .* that were lost and answered again with other bytes"):
        jobs.run(job, backend=MadeUpParts(longer))
    assert not folder_of(job).exists("_SUCCESS") and len(tables.snapshots(NAME)) == 1


def test_a_damaged_record_is_named(tables: Tables, checkpoint: Path, tmp_path: Path) -> None:
    job = job_into(tables, checkpoint, tmp_path)
    made_up(job)
    folder = folder_of(job)
    for damaged in (b"", b"[]", b'{"a": 1}', b'{"a": {"table": "x"}}'):
        folder.replace(RECORD, damaged)
        with pytest.raises(UserError, match=r"_job/tables.json: damaged; restore it from a copy"):
            made_up(job)


def test_an_expired_snapshot_whose_files_are_still_there_is_not_added_again(
    iceberg: IcebergTables, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_into(iceberg, checkpoint, tmp_path)
    made_up(job)
    (own,) = iceberg.snapshots(NAME)
    made_up(job_into(iceberg, checkpoint, tmp_path, "other", rows=1))
    iceberg.table(NAME).maintenance.expire_snapshots().by_id(own).commit()
    folder_of(job).remove(RECORD)
    folder_of(job).remove("_SUCCESS")
    assert made_up(job) == 0
    assert len(iceberg.rows(NAME)) == 7 and "an expired snapshot has" in caplog.text


def refused(job: JobConfig, tmp_path: Path) -> str:
    """The line with which the command refuses the job, exit status 2, before it writes anything."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(json.loads(job.model_dump_json(exclude_none=True))))
    result = CliRunner().invoke(app, ["run", str(file)])
    assert result.exit_code == 2, result.output
    assert not folder_of(job).names("_job") and not folder_of(job).names()
    (line,) = result.stderr.splitlines()
    return line.removeprefix(f"skipdecode: {file}: ")


@pytest.mark.usefixtures("in_process")
def test_a_table_with_other_columns_is_refused_in_one_line(tables: Tables, checkpoint: Path, tmp_path: Path) -> None:
    job = job_into(tables, checkpoint, tmp_path)
    made_up(job_into(tables, checkpoint, tmp_path, "first"))
    assert refused(with_output(job, keep=["prompt"]), tmp_path) == (
        f"output.table: {tables.path(NAME)} has no column 'prompt', which the job writes (string); choose another "
        "table, or change output.keep"
    )
    other = output_table(job.output, job.storage)
    tables.append("in.other", pa.table({"id": pa.array([1], pa.int64())}))
    job = with_output(job, table=tables.path("in.other"))
    if tables.kind == "delta":
        assert "does not hold output.path" in refused(job, tmp_path)
        job = with_output(job, path=f"{tables.path('in.other')}/run")
    assert refused(job, tmp_path).startswith(f"output.table: {tables.path('in.other')} has column 'id' of type long, ")
    assert other.snapshot_of("none") is None


@pytest.mark.usefixtures("in_process")
def test_a_new_table_without_a_place_is_refused(iceberg: IcebergTables, checkpoint: Path, tmp_path: Path) -> None:
    job = job_into(iceberg, checkpoint, tmp_path)
    catalog = job.storage.catalog.model_copy(update={"warehouse": None})
    job = job.model_copy(update={"storage": job.storage.model_copy(update={"catalog": catalog})})
    assert refused(job, tmp_path) == (
        "output.table: out.answers does not exist: create it, or set storage.catalog.warehouse"
    )
    iceberg.catalog.create_namespace("out", {"location": f"{tmp_path}/elsewhere"})
    assert made_up(job) == 6 and len(iceberg.rows(NAME)) == 6


@pytest.mark.usefixtures("in_process")
def test_a_column_that_no_table_holds_is_refused(tables: Tables, checkpoint: Path, tmp_path: Path) -> None:
    job = job_into(tables, checkpoint, tmp_path)
    rows = prompts(0, 2).append_column("n", pa.array([[1], [2]], pa.list_(pa.uint32())))
    pq.write_table(rows, tmp_path / "run 1.parquet")
    assert refused(with_output(job, keep=["n"]), tmp_path) == (
        f"output.table: {tables.path(NAME)} cannot hold column 'n' of type uint32; leave it out of output.keep, or "
        "convert the input's column"
    )


@pytest.mark.usefixtures("in_process")
def test_partitioned_and_strict_tables_are_refused(tables: Tables, checkpoint: Path, tmp_path: Path) -> None:
    job = job_into(tables, checkpoint, tmp_path)
    if isinstance(tables, IcebergTables):
        field = NestedField(1, "id", StringType(), required=False)
        spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "id_part"))
        tables.catalog.create_namespace("out")
        tables.catalog.create_table(NAME, Schema(field), partition_spec=spec)
        assert "is partitioned by id_part; choose a table without" in refused(job, tmp_path)
        tables.catalog.drop_table(NAME)
        tables.catalog.create_table(NAME, Schema(NestedField(1, "n", LongType(), required=True)))
        assert "does not allow null in 'n'" in refused(job, tmp_path)
        return
    write_deltalake(tables.path(NAME), prompts(0, 1), partition_by=["id"])
    assert "is partitioned by id; choose a table without" in refused(job, tmp_path)
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    write_deltalake(tables.path("out.strict"), pa.table({"n": [1]}, schema=strict))
    job = with_output(job, table=tables.path("out.strict"), path=f"{tables.path('out.strict')}/run")
    assert "does not allow null in 'n'" in refused(job, tmp_path)
    DeltaTable(tables.path("out.strict")).alter.drop_column_not_null("n")
    DeltaTable(tables.path("out.strict")).alter.add_constraint({"positive": "n > 0"})
    assert "has the rule delta.constraints.positive" in refused(job, tmp_path)
    write_deltalake(tables.path("out.tracked"), prompts(0, 1))
    log = Path(tables.path("out.tracked")) / "_delta_log" / f"{0:020}.json"
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly", "rowTracking"]}
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    entries = [{"protocol": protocol} if "protocol" in entry else entry for entry in entries]
    log.write_text("\n".join(map(json.dumps, entries)) + "\n")
    job = with_output(job, table=tables.path("out.tracked"), path=f"{tables.path('out.tracked')}/run")
    assert "uses rowTracking, which a job's files do not support" in refused(job, tmp_path)
