"""Tables in job files: keys that do not go together are refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config
from pipeline.messages import install_command

JOB: dict[str, dict[str, Any]] = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "model"}}
ICEBERG = {"path": "a.b", "format": "iceberg"}


def written(folder: Path, **sections: Any) -> Path:
    file = folder / "job.yaml"
    file.write_text(
        yaml.safe_dump({name: {**JOB.get(name, {}), **sections.get(name, {})} for name in {*JOB, *sections}})
    )
    return file


@pytest.mark.parametrize(
    ("sections", "refusal"),
    [
        ({"input": {"snapshot": 1}}, "input: snapshot is only for tables: also set format: iceberg or delta"),
        ({"input": {**ICEBERG, "path": ["a.b", "c.d"]}}, "input: format: iceberg reads one table; give one path"),
        ({"input": {**ICEBERG, "snapshot": -1}}, "input.snapshot: input should be greater than or equal to 0, not -1"),
        (
            {"input": {**ICEBERG, "snapshot": 1, "since": "last_success"}},
            "input: give snapshot or since, not both",
        ),
        (
            {"input": {**ICEBERG, "changed": "ignore", "since": "last_success"}},
            "input: changed is only for files: a table's snapshots show which rows were added",
        ),
        ({"output": {"table": "a.b"}}, "output: table needs format: iceberg or delta"),
        (
            {"output": {"format": "iceberg"}},
            "output: format: iceberg needs table: the table's name in storage.catalog, as namespace.table",
        ),
        (
            {"storage": {"catalog": {"typ": "sql"}}},
            "unknown key storage.catalog.typ; did you mean type?",
        ),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, sections: dict[str, Any], refusal: str) -> None:
    file = written(tmp_path, **sections)
    with pytest.raises(UserError) as error:
        load_config(JobConfig, file)
    assert str(error.value) == f"{file}: {refusal}"


def test_a_table_is_any_of_the_formats(tmp_path: Path) -> None:
    catalog = {"name": "prod", "type": "sql", "uri": "sqlite:////data/catalog.db", "warehouse": "s3://bucket/house"}
    output = {"format": "delta", "table": "s3://bucket/answers"}
    job = load_config(JobConfig, written(tmp_path, input=ICEBERG, output=output, storage={"catalog": catalog}))
    assert job.input.is_table and job.output.is_table and job.result_format == "delta"
    assert job.storage.catalog.properties() == {key: value for key, value in catalog.items() if key != "name"}
    plain = load_config(JobConfig, written(tmp_path))
    assert not plain.input.is_table and not plain.output.is_table and plain.storage.catalog.properties() == {}


@pytest.mark.parametrize(
    ("sections", "package"),
    [
        ({"input": ICEBERG}, "pyiceberg"),
        ({"input": {"format": "delta"}}, "deltalake"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("pipeline.input.iceberg", "pipeline.input.delta"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pipeline.input.iceberg", "pipeline.input.iceberg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["run", str(written(tmp_path, **sections))])
    assert result.exit_code == 2
    assert result.stderr == f"skipdecode: {package} is not installed: {install_command('tables')}\n"
