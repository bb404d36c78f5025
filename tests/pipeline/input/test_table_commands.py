"""The commands of pipeline/README.md over tables, as they stand there; and that no secret of a catalog is let out."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config
from shown_commands import ROOT, blocks, commands_of_example, run_commands
from table_stores import config, local_tables, prompts
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config.job import CatalogConfig, StorageConfig
from pipeline.input.iceberg import open_catalog

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
    assert "nothing left to do: all 40 rows are answered already" in said[1]
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
