"""Tables as input: the rows that their library reads at a snapshot, or a refusal; and the commands of the README."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deleted_rows import delete_by_file, delete_by_vector
from deltalake import DeltaTable, Field, Schema, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import run_in_process
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType
from pyiceberg.utils.config import Config
from ray_free_run import MadeUpParts, commit_made_up_parts
from shown_commands import ROOT, blocks, commands_of_example, run_commands
from table_stores import LOCAL, DeltaTables, IcebergTables, Tables, config, local_tables, prompts, with_output
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.cli.app import app
from pipeline.config.adapt import AdaptConfig
from pipeline.config.job import CatalogConfig, JobConfig, StorageConfig
from pipeline.input.delta import find_table
from pipeline.input.files import list_input
from pipeline.input.iceberg import open_catalog
from pipeline.input.rows import read_rows
from pipeline.learn.adapt.configs import full_depth_job
from pipeline.learn.adapt.rows import layout, read_sample
from pipeline.plan.manifest import Manifest, pinned_snapshot, with_snapshot
from pipeline.try_rows import answer_first_rows

NAME = "in.prompts"


def job_over(tables: Tables, checkpoint: Path, keep: Sequence[str] = ("prompt",), **section: Any) -> JobConfig:
    source = {"path": tables.path(NAME), "format": tables.kind, "id": "id", **section}
    return config(tables, checkpoint, input=source, output={"path": f"{tables.root}/out", "keep": list(keep)})


def planned(job: JobConfig) -> Manifest:
    return jobs.plan(job, None, MadeUpParts()).manifest


def rows_of(manifest: Manifest, name: str = "id") -> list[Any]:
    """The values of a column as a job reads them, shard by shard."""
    values: list[Any] = []
    for file in manifest.files:
        shards = [shard for shard in manifest.shards if shard.url == file.url]
        for table in read_rows(shards, file, manifest.schema, LOCAL) if shards else ():
            values += table[name].to_pylist()
    return values


def refusal(job: JobConfig) -> str:
    with pytest.raises(UserError) as error:
        planned(job)
    assert "\n" not in str(error.value)
    return str(error.value)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    at=st.integers(0, 3),
    kind=st.sampled_from(["iceberg", "delta"]),
)
def test_a_snapshot_is_read_row_by_row_as_the_library_reads_it(
    counts: list[int], at: int, kind: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tables = local_tables(kind, tmp_path_factory.mktemp("law"))
    for number, count in enumerate(counts):
        tables.append(NAME, prompts(10 * number, count))
    snapshots = tables.snapshots(NAME)
    snapshot = snapshots[min(at, len(snapshots) - 1)]
    if isinstance(tables, IcebergTables):
        expected = tables.table(NAME).scan(snapshot_id=snapshot).to_arrow()
    else:
        expected = DeltaTable(tables.path(NAME), version=snapshot).to_pyarrow_table()
    manifest = planned(job_over(tables, checkpoint, snapshot=snapshot))
    assert sorted(rows_of(manifest)) == sorted(expected["id"].to_pylist())
    assert sorted(rows_of(manifest, "prompt")) == sorted(expected["prompt"].to_pylist())
    assert manifest.identity["input"]["snapshot"] == snapshot


def test_a_job_answers_the_snapshot_of_its_planning_whatever_happens_to_the_table(
    tables: Tables, checkpoint: Path
) -> None:
    tables.append(NAME, prompts(0, 3))
    tables.append(NAME, prompts(3, 3))
    (_, pinned) = tables.snapshots(NAME)
    job = job_over(tables, checkpoint)

    def half(shards: Any, folder: Any, fingerprint: str) -> None:
        commit_made_up_parts(shards[:1], folder, fingerprint)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        jobs.run(job, backend=MadeUpParts(half))
    tables.append(NAME, prompts(6, 3))
    tables.delete(NAME, "id = 'r0'")
    result = jobs.run(job, backend=MadeUpParts())
    assert (result.totals.rows, result.fresh_rows) == (6, 4)
    assert result.manifest.identity["input"]["snapshot"] == pinned
    named = job_over(tables, checkpoint, snapshot=pinned)
    assert jobs.run(named, backend=MadeUpParts()).fresh_rows == 0  # the same job
    newer = job_over(tables, checkpoint, snapshot=tables.snapshots(NAME)[-1])
    with pytest.raises(
        UserError, match=r"holds another job, which differs in input.snapshot; --overwrite .* another output.path"
    ):
        jobs.run(newer, backend=MadeUpParts())


def test_a_data_file_that_is_gone_or_replaced_is_refused(tables: Tables, checkpoint: Path) -> None:
    tables.append(NAME, prompts(0, 3))
    job = job_over(tables, checkpoint)
    (url,) = (file.url for file in planned(job).files)
    data = Path(url).read_bytes()
    Path(url).write_bytes(data + b" ")
    says = f"{url}: has {len(data) + 1} bytes, but {tables.path(NAME)} lists it with {len(data)} bytes"
    assert refusal(job) == f"{says}; restore the file"
    Path(url).unlink()
    assert refusal(job) == f"{url}: this data file of {tables.path(NAME)} is gone; restore it, or repair the table"


def test_adapt_samples_the_rows_of_a_table_and_answers_them_as_a_file(
    tables: Tables, checkpoint: Path, tmp_path: Path
) -> None:
    tables.append(NAME, prompts(0, 3))
    job = job_over(tables, checkpoint)
    job = with_output(job, format=tables.kind, table=job.output.path)
    job = job.model_copy(update={"adapt": AdaptConfig(rows=4, held_out=2)})
    pinned = with_snapshot(job, pinned_snapshot(job, None))
    files, schema = layout(pinned, list_input(pinned.input, job.storage))
    sample, readable = read_sample(job, files, schema, [2, 0])
    column = prompts(0, 3)["prompt"].to_pylist()
    assert sample["prompt"].to_pylist() == [column[2], column[0]] and readable == [True, True]
    over_sample = full_depth_job(job, resolve_checkpoint(job.model, job.storage), tmp_path)
    assert not over_sample.input.is_table and not over_sample.output.is_table
    JobConfig.model_validate(over_sample.model_dump())


def test_rows_that_delete_files_delete_are_never_read(iceberg: IcebergTables, checkpoint: Path, tmp_path: Path) -> None:
    iceberg.append(NAME, prompts(0, 3))
    before = iceberg.snapshots(NAME)[-1]
    url = delete_by_file(iceberg.table(NAME), tmp_path)
    assert iceberg.rows(NAME)["id"].to_pylist() == ["r1", "r2"]  # the library applies it
    assert refusal(job_over(iceberg, checkpoint)) == (
        f"{url}: delete files of in.prompts delete rows of this data file; compact the table "
        "(rewrite_data_files) and read the new snapshot"
    )
    assert planned(job_over(iceberg, checkpoint, snapshot=before)).rows == 3
    delete_by_file(iceberg.table(NAME), tmp_path, equality=True)
    assert "does not yet support equality deletes" in refusal(job_over(iceberg, checkpoint))


def test_rows_that_a_deletion_vector_deletes_are_never_read(delta: DeltaTables, checkpoint: Path) -> None:
    table = delta.path(NAME)
    write_deltalake(table, prompts(0, 3), configuration={"delta.enableDeletionVectors": "true"})
    assert planned(job_over(delta, checkpoint)).rows == 3  # enabled, and none there
    url = delete_by_vector(Path(table))
    assert refusal(job_over(delta, checkpoint)) == (
        f"{url}: a deletion vector of {table} deletes rows of this data file; rewrite the table (OPTIMIZE, or REORG "
        "TABLE ... APPLY (PURGE)) and read the new version"
    )


def test_a_column_that_came_later_is_null_in_older_files(tables: Tables, checkpoint: Path) -> None:
    tables.append(NAME, prompts(0, 2))
    if isinstance(tables, IcebergTables):
        with tables.table(NAME).update_schema() as update:
            update.add_column("topic", StringType())
    else:
        DeltaTable(tables.path(NAME)).alter.add_columns([Field("topic", "string")])
    job = job_over(tables, checkpoint, ["prompt", "topic"])
    assert rows_of(planned(job), "topic") == [None, None]  # in no file yet
    tables.append(NAME, prompts(2, 1).append_column("topic", pa.array(["rivers"])))
    manifest = planned(job)
    expected = tables.rows(NAME)
    ids = rows_of(manifest)
    found = dict(zip(ids, rows_of(manifest, "topic"), strict=True))
    assert found == dict(zip(expected["id"].to_pylist(), expected["topic"].to_pylist(), strict=True))
    asked = job_over(tables, checkpoint, ["topic"], template="{{ prompt }} {{ topic or '' }}")
    assert run_in_process(asked.model_copy(update={"shared_prefix": True})).totals.errors == 0
    assert [row.id for row in answer_first_rows(asked, 2)] == ids[:2]
    answered = pq.read_table(asked.output.path)
    assert dict(zip(answered["id"].to_pylist(), answered["topic"].to_pylist(), strict=True)) == found


def test_a_renamed_or_reused_column_name_is_never_read_from_older_files(
    iceberg: IcebergTables, checkpoint: Path
) -> None:
    """By name the old files would give another column's values: Iceberg knows columns by their ids."""
    iceberg.append(NAME, prompts(0, 2).append_column("text", pa.array(["old"] * 2)))
    job = job_over(iceberg, checkpoint)
    with iceberg.table(NAME).update_schema() as update:
        update.rename_column("prompt", "question").rename_column("text", "prompt")
    assert "its column 'prompt' is not the table's column of this name; compact the table" in refusal(job)
    with iceberg.table(NAME).update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("prompt")
    with iceberg.table(NAME).update_schema() as update:
        update.add_column("prompt", StringType())
    assert "its column 'prompt' is not the table's column of this name" in refusal(job)
    renamed = job_over(iceberg, checkpoint, [], prompt="question")
    assert "has column 'question' under its earlier name 'prompt'" in refusal(renamed)


def test_a_name_that_iceberg_writes_otherwise_into_its_files_is_refused(
    iceberg: IcebergTables, checkpoint: Path
) -> None:
    """A compaction, the remedy for a renamed column, would write it as before."""
    iceberg.append(NAME, prompts(0, 2).rename_columns(["id", "my prompt"]))
    said = refusal(job_over(iceberg, checkpoint, [], prompt="my prompt"))
    assert "hold column 'my prompt' as 'my_x20prompt'; rename it in the table to letters, digits and _, and" in said


def test_a_delta_table_with_a_feature_that_deltalake_lacks_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """deltalake opens the table, and fails at its list of files."""
    tables = DeltaTables(str(tmp_path), LOCAL)
    tables.append(NAME, prompts(0, 1))
    own = {f"{side}Features": ["typeWidening"] for side in ("reader", "writer")}
    entries = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **own}}, {"commitInfo": {"timestamp": 1}}]
    log = Path(tables.path(NAME)) / "_delta_log" / f"{1:020}.json"
    log.write_text("\n".join(map(json.dumps, entries)))
    assert "the Delta table cannot be read at version 1: " in refusal(job_over(tables, checkpoint))


@pytest.mark.parametrize("version", [1, 4358109269898282718])
def test_a_delta_version_that_does_not_exist_is_refused(version: int, tmp_path: Path, checkpoint: Path) -> None:
    tables = DeltaTables(str(tmp_path), LOCAL)
    tables.append(NAME, prompts(0, 1))
    said = refusal(job_over(tables, checkpoint, snapshot=version))
    assert said == f"{tables.path(NAME)}: the Delta table has no version {version}; the newest is 0"


def test_a_nested_field_is_known_by_its_id_too(iceberg: IcebergTables, checkpoint: Path) -> None:
    meta = pa.array([{"a": "x", "b": "y"}] * 2)
    iceberg.append(NAME, prompts(0, 2).append_column("meta", meta))
    job = job_over(iceberg, checkpoint, template="{{ meta.a }}")
    assert planned(job).rows == 2
    with iceberg.table(NAME).update_schema() as update:
        update.rename_column("meta.a", "c")
    assert "its column 'meta.a' is not the table's column of this name" in refusal(job)
    with iceberg.table(NAME).update_schema() as update:
        update.add_column(("meta", "d"), LongType())
    assert "its column 'meta.a' is not the table's column" in refusal(job)


def test_files_without_field_ids_are_read_by_the_name_mapping(
    iceberg: IcebergTables, checkpoint: Path, tmp_path: Path
) -> None:
    iceberg.catalog.create_namespace("in")
    pq.write_table(prompts(0, 2), tmp_path / "plain.parquet")
    table = iceberg.catalog.create_table(NAME, prompts(0, 0).schema)
    table.add_files([str(tmp_path / "plain.parquet")])
    job = job_over(iceberg, checkpoint)
    assert rows_of(planned(job)) == ["r0", "r1"]
    with iceberg.table(NAME).update_schema() as update:
        update.rename_column("prompt", "question")
    renamed = job_over(iceberg, checkpoint, [], prompt="question")
    assert "has column 'question' under its earlier name 'prompt'" in refusal(renamed)
    assert refusal(job).startswith("in.prompts: no column 'prompt' at snapshot")


def test_a_partition_column_that_the_files_lack_is_refused(
    delta: DeltaTables, iceberg: IcebergTables, checkpoint: Path
) -> None:
    write_deltalake(delta.path(NAME), prompts(0, 2), partition_by=["prompt"])
    assert refusal(job_over(delta, checkpoint)) == (
        f"{delta.path(NAME)}: 'prompt' is a partition column, which the data files do not hold; leave it out"
    )
    assert sorted(rows_of(planned(job_over(delta, checkpoint, [], template="{{ id }}")))) == ["r0", "r1"]
    iceberg.catalog.create_namespace("in")
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "prompt"))
    fields = [NestedField(number, name, StringType(), required=False) for number, name in ((1, "id"), (2, "prompt"))]
    iceberg.catalog.create_table(NAME, IcebergSchema(*fields), partition_spec=spec)
    iceberg.table(NAME).append(prompts(0, 2))  # whose files hold it
    assert sorted(rows_of(planned(job_over(iceberg, checkpoint)))) == ["r0", "r1"]


def test_what_is_missing_is_named(tables: Tables, checkpoint: Path) -> None:
    job = job_over(tables, checkpoint)
    if tables.kind == "iceberg":
        assert refusal(job) == "input.path: no table in.prompts in catalog 'test'; check storage.catalog"
        bare = job_over(tables, checkpoint, path="prompts")
        assert refusal(bare) == "prompts: the name of an Iceberg table must be namespace.table"
    else:
        assert refusal(job) == f"input.path: {tables.path(NAME)} holds no Delta table"
    tables.append(NAME, prompts(0, 2).drop_columns("prompt"))
    snapshot = tables.snapshots(NAME)[-1]
    at = "snapshot" if tables.kind == "iceberg" else "version"
    assert refusal(job) == f"{tables.path(NAME)}: no column 'prompt' at {at} {snapshot}; it has id"
    assert "77" in refusal(job_over(tables, checkpoint, snapshot=77))


def test_a_table_without_rows_is_refused(tables: Tables, checkpoint: Path) -> None:
    if isinstance(tables, IcebergTables):
        tables.catalog.create_namespace("in")
        tables.catalog.create_table(NAME, prompts(0, 0).schema)
    else:
        DeltaTable.create(tables.path(NAME), Schema.from_arrow(prompts(0, 0).schema))
    assert refusal(job_over(tables, checkpoint)) == f"{tables.path(NAME)}: the table has no rows"


def test_a_delta_tables_log_is_not_read_for_each_file(
    delta: DeltaTables, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("pipeline.input.delta.find_table", lambda *asked: opened.append(asked) or find_table(*asked))
    for number in range(6):
        delta.append(NAME, prompts(number, 1))
    assert planned(job_over(delta, checkpoint)).rows == 6 and len(opened) == 4


def test_a_mapped_delta_table_is_refused(delta: DeltaTables, checkpoint: Path) -> None:
    delta.append(NAME, prompts(0, 2))
    log = Path(delta.path(NAME)) / "_delta_log" / f"{0:020}.json"
    log.write_text(log.read_text().replace('"configuration":{}', '"configuration":{"delta.columnMapping.mode":"name"}'))
    refused = refusal(job_over(delta, checkpoint))
    assert "the table's columns have other names in its files (delta.columnMapping.mode = name)" in refused


def test_a_catalog_that_cannot_be_opened_is_one_line(iceberg: IcebergTables, checkpoint: Path, tmp_path: Path) -> None:
    for uri, said in (
        (f"sqlite:///{tmp_path}/no/such/folder.db", "unable to open database file"),
        (f"sqlite:///{tmp_path}/empty.db", "no such table: iceberg_tables"),
        ("nonsense", "Could not parse SQLAlchemy URL"),
    ):
        storage = {"catalog": {"name": "prod", "type": "sql", "uri": uri}}
        job = job_over(iceberg, checkpoint).model_copy(update={"storage": LOCAL.model_validate(storage)})
        line = refusal(job)
        assert line.startswith("storage.catalog 'prod': ") and said in line


PASSWORD = "planted-catalog-password"


@pytest.mark.usefixtures("in_process")
def test_the_readmes_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [shown] = blocks("pipeline/README.md")
    assert shown == commands_of_example("table.yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    said = run_commands(shown)
    catalog = load_catalog("demo", type="sql", uri="sqlite:///work/tables/catalog.db", warehouse="unused")
    table = catalog.load_table("demo.answers")
    (snapshot,) = table.snapshots()
    assert f"table: demo.answers, snapshot {snapshot.snapshot_id}" in said[0]
    assert "nothing left to do: the output has 40 rows, 0 with an error" in said[1]
    assert said[2].count("answer:") == 5
    rows = table.scan().to_arrow()
    assert len(rows) == 40 and rows["generated_text"].null_count == 0
    parts = pq.read_table("work/tables/answers")
    assert sorted(rows["id"].to_pylist()) == sorted(parts["id"].to_pylist())
    monkeypatch.chdir("/")
    assert len(table.scan().to_arrow()) == 40  # no path in it depends on the folder of the command


@pytest.mark.parametrize(
    "uri",
    [
        f"postgresql://user:{PASSWORD}@host/catalog",
        f"postgresql://host/catalog?user=u&password={PASSWORD}",
        f"http://host/catalog?token={PASSWORD}",
    ],
)
def test_a_password_in_a_catalogs_uri_is_refused_and_not_repeated(tmp_path: Path, uri: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: {path: a}\noutput: {path: b}\nmodel: {path: c}\n")
    result = CliRunner().invoke(app, ["run", str(file), "--set", f"storage.catalog.uri={uri}"])
    assert result.exit_code == 2 and PASSWORD not in result.output
    assert "storage.catalog.uri: holds a user or password" in result.stderr


@pytest.mark.parametrize("way", ["works", "does not answer"])
def test_a_catalogs_secrets_from_the_environment_are_in_no_message_or_file(
    way: str,
    in_process: None,
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = local_tables("iceberg", tmp_path)
    tables.append("in.prompts", prompts(0, 2))
    uri = tables.storage()["catalog"]["uri"] if way == "works" else f"http://user:{PASSWORD}@127.0.0.1:9/catalog"
    source = {"path": "in.prompts", "format": "iceberg", "id": "id"}
    output = {"path": str(tmp_path / "out"), "format": "iceberg", "table": "in.answers"}
    job = config(tables, checkpoint, input=source, output=output, storage={"catalog": {"name": "test"}})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
    settings = {"URI": uri, "TOKEN": PASSWORD, "WAREHOUSE": f"{tmp_path}/house", "S3__SECRET_ACCESS_KEY": PASSWORD}
    for key, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__TEST__{key}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # pyiceberg reads it when it is imported
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.DEBUG, "pipeline"):
        result = CliRunner().invoke(app, ["run", str(tmp_path / "job.yaml"), "--verbose"])
    if way == "works":
        assert result.exit_code == 0 and len(tables.rows("in.answers")) == 2, result.stderr
    else:
        assert result.exit_code == 1 and "skipdecode: failed: storage.catalog 'test': " in result.stderr, result.stderr
    assert PASSWORD not in result.output + caplog.text
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_the_warehouse_in_tables_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = CatalogConfig(type="sql", uri="sqlite://", warehouse="house")
    catalog = open_catalog(StorageConfig(catalog=section), create=True)
    assert catalog.properties["warehouse"] == str(tmp_path / "house")
