"""The recipe `lakehouse`: only rows that a table holds are answered, each once, and registered once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from deleted_rows import delete_by_file, delete_by_vector
from deltalake import DeltaTable, write_deltalake
from pyiceberg.utils.config import Config
from shown_commands import ROOT, blocks, printed_lines, run_commands
from table_stores import DeltaTables, IcebergTables, Tables, prompts

RECIPE = ROOT / "configs" / "recipes" / "lakehouse"
NAME, ANSWERS = "lake.prompts", "lake.answers"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe's program. The command that it calls runs in this process."""
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.delitem(sys.modules, "lakehouse", raising=False)
    import lakehouse

    run = SimpleNamespace(run=lambda line, check: run_commands([" ".join(line)]))
    monkeypatch.setattr(lakehouse, "subprocess", run)
    return lakehouse


@pytest.fixture(params=["delta", "iceberg"])
def tables(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """No table yet, of either format."""
    if request.param == "delta":
        return DeltaTables(f"{tmp_path}/tables")
    found = IcebergTables(tmp_path)
    monkeypatch.setenv("PYICEBERG_CATALOG__DEMO__URI", found.uri)
    monkeypatch.setenv("PYICEBERG_CATALOG__DEMO__WAREHOUSE", found.warehouse)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # read when pyiceberg is imported
    return found


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path) -> Callable[..., tuple[str, str]]:
    """Return a template for a job or for nights, and the name of the job file to write."""

    def template(**section: Any) -> tuple[str, str]:
        values = yaml.safe_load((RECIPE / ("nightly.yaml" if section else "job.yaml")).read_text())
        values["output"]["path"] = str(tmp_path / "out")
        values["model"]["path"] = str(checkpoint)
        values["schedule"] = {"speedup": 1}
        values["sampling"] = {"max_new_tokens": 3}
        (tmp_path / "template.yaml").write_text(yaml.safe_dump(values))
        return str(tmp_path / "template.yaml"), str(tmp_path / "made" / "job.yaml")

    return template


def answered(tables: Tables) -> list[str]:
    return sorted(tables.rows(ANSWERS)["id"].to_pylist())


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as left:
        call(*arguments)
    return str(left.value)


@pytest.mark.usefixtures("in_process")
def test_the_rows_of_one_version_are_answered_and_registered_once(
    recipe: ModuleType, tables: Tables, job: Callable[..., tuple[str, str]]
) -> None:
    tables.append(NAME, prompts(0, 3))
    tables.delete(NAME, "id = 'r1'")  # the old file still lies in the table's folder
    template, made = job()
    recipe.list_files(tables.path(NAME), template, made)
    tables.append(NAME, prompts(3, 2))  # after the listing
    run_commands([f"skipdecode run {made}"])
    for _ in range(2):
        recipe.register(made, tables.path(ANSWERS))
        assert answered(tables) == ["r0", "r2"]
    assert tables.rows(ANSWERS)["generated_text"].null_count == 0


@pytest.mark.usefixtures("in_process")
def test_nights_answer_what_was_appended_and_nothing_of_a_compaction(
    recipe: ModuleType, tables: Tables, job: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (tables.path(NAME), *job(since=True), tables.path(ANSWERS))
    tables.append(NAME, prompts(0, 2))
    tables.append(NAME, prompts(2, 1))
    recipe.night(*arguments)
    assert answered(tables) == ["r0", "r1", "r2"]
    tables.compact(NAME)
    recipe.night(*arguments)
    assert answered(tables) == ["r0", "r1", "r2"]
    tables.append(NAME, prompts(3, 1))
    tables.compact(NAME)
    tables.append(NAME, prompts(4, 1))
    recipe.night(*arguments)
    assert answered(tables) == [f"r{row}" for row in range(5)]
    tables.delete(NAME, "id = 'r0'")
    assert "changed or deleted rows" in refusal(recipe.night, *arguments)
    assert answered(tables) == [f"r{row}" for row in range(5)]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("moment", ["before the run", "before the registration"])
def test_a_night_that_was_cut_short_is_made_good_by_the_next(
    recipe: ModuleType,
    tables: Tables,
    job: Callable[..., tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    arguments = (tables.path(NAME), *job(since=True), tables.path(ANSWERS))
    tables.append(NAME, prompts(0, 2))

    def die(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(1, "")

    with monkeypatch.context() as dying:
        dying.setattr(*((recipe.subprocess, "run") if moment == "before the run" else (recipe, "register")), die)
        with pytest.raises(subprocess.CalledProcessError):
            recipe.night(*arguments)
    tables.compact(NAME)
    tables.append(NAME, prompts(2, 1))
    recipe.night(*arguments)
    assert answered(tables) == ["r0", "r1", "r2"]


def test_deleted_rows_that_files_still_hold_are_refused(
    recipe: ModuleType, tables: Tables, tmp_path: Path, job: Callable[..., tuple[str, str]]
) -> None:
    if isinstance(tables, DeltaTables):
        features = {"delta.enableDeletionVectors": "true"}
        write_deltalake(tables.path(NAME), prompts(0, 2), configuration=features)
        delete_by_vector(Path(tables.path(NAME)))
    else:
        tables.append(NAME, prompts(0, 2))
        delete_by_file(tables.table(NAME), tmp_path)
    assert "delete" in refusal(recipe.list_files, tables.path(NAME), *job())
    assert not (tmp_path / "made").exists()


def test_another_table_a_lost_history_and_renamed_columns_are_refused(recipe: ModuleType, tables: Tables) -> None:
    files = recipe.delta_files if isinstance(tables, DeltaTables) else recipe.iceberg_files
    tables.append(NAME, prompts(0, 2))
    pin, _ = files(tables.path(NAME), None)
    assert files(tables.path(NAME), pin) == (pin, [])
    assert "README.md" in refusal(files, tables.path(NAME), ("another", pin[1] + 1))
    tables.append(NAME, prompts(2, 2))
    tables.append(NAME, prompts(4, 2))
    assert len(files(tables.path(NAME), pin)[1]) == 2
    tables.expire(NAME)
    assert "README.md" in refusal(files, tables.path(NAME), pin)
    if isinstance(tables, IcebergTables):
        with tables.table(NAME).update_schema() as update:
            update.rename_column("prompt", "old")
        assert "renamed" in refusal(files, tables.path(NAME), None)


@pytest.mark.usefixtures("in_process")
def test_the_readmes_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    readme = "configs/recipes/lakehouse/README.md"
    (printed,) = run_commands(blocks(readme)[0])
    assert set(printed_lines(readme)) <= set(printed.splitlines())
    rows = DeltaTable("work/recipes/lakehouse/table").to_pyarrow_table()
    assert sorted(rows["id"].to_pylist()) == ["Aromi", "The Mill", "Zizzi"] and "3 rows in " in printed
