"""`input.since: last_success` over a table: every appended row is answered once, whatever else happens to the table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import InProcess
from ray_free_run import MadeUpParts, commit_made_up_parts
from table_stores import DeltaTables, IcebergTables, Tables, bucket_tables, config, local_tables, prompts, with_output

from actors.engine.errors import UserError
from pipeline.commit import table as commit_tables
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.estimate import NothingLeft, estimate
from pipeline.incremental import ledger as ledgers
from pipeline.incremental import runs
from pipeline.incremental.runs import IncrementalResult
from pipeline.input.rows import read_rows
from pipeline.input.shards import Shard
from pipeline.plan import plan_files
from pipeline.storage.folder import Folder, open_folder

NAME, OUT = "in.prompts", "out.answers"


def job_over(tables: Tables, checkpoint: Path, into_table: bool = False) -> JobConfig:
    source = {"path": tables.path(NAME), "format": tables.kind, "id": "id", "since": "last_success"}
    output: dict[str, Any] = {"path": f"{tables.root}/out/answers"}
    if into_table:
        output |= {"format": tables.kind, **({"table": OUT} if tables.kind == "iceberg" else {})}
    return config(tables, checkpoint, input=source, output=output)


def run(job: JobConfig, answer: Any = commit_made_up_parts) -> IncrementalResult:
    return runs.run(job, backend=MadeUpParts(answer))


def answered(job: JobConfig) -> list[str]:
    """Ids of the rows that successful runs answered: of their plans, read again."""
    ids: list[str] = []
    root = open_folder(job.output.path, job.storage)
    for one in ledgers.read(root).runs:
        folder = open_folder(f"{root.url}/{one.folder}", job.storage)
        manifest = plan_files.load(folder)
        if one.state != "success":
            continue
        assert manifest is not None and folder.exists("_SUCCESS")
        for shard in manifest.shards:
            file = next(file for file in manifest.files if file.url == shard.url)
            (table,) = read_rows([shard], file, manifest.schema, job.storage)
            ids += table["id"].to_pylist()
    return sorted(ids)


class Model:
    """What a table and the runs over it must have done by now."""

    def __init__(self) -> None:
        self.made = 0  # appends
        self.live: set[str] = set()  # rows of the table
        self.due: set[str] = set()  # rows that successful runs answer
        self.claimed: set[str] | None = None  # rows of a run that has not finished
        self.has_begun = self.deleted = False  # a run ever; rows deleted since the last run began

    def refusal(self) -> str | None:
        """What a new run, after the rest of an unfinished one, is refused for."""
        if self.has_begun and self.deleted:
            return "changed or deleted rows since"
        return None if self.live or self.has_begun else "the table has no rows"

    def begin(self) -> None:
        self.has_begun, self.deleted = True, False


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.sampled_from(["append", "append", "compact", "run", "interrupted", "delete"]), max_size=7),
    kind=st.sampled_from(["iceberg", "delta"]),
)
def test_every_appended_row_is_answered_once(
    steps: list[str], kind: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tables, model = local_tables(kind, tmp_path_factory.mktemp("law")), Model()
    job = job_over(tables, checkpoint)
    for step in ["append", *steps, "run"]:
        if step == "append":
            rows = prompts(10 * model.made, 2)
            tables.append(NAME, rows)
            model.made += 1
            model.live.update(rows["id"].to_pylist())
        elif step == "compact" and model.live:
            tables.compact(NAME)
        elif step == "delete" and model.live:
            gone = min(model.live)
            tables.delete(NAME, f"id = '{gone}'")
            model.live.remove(gone)
            model.deleted = model.has_begun
        elif step == "interrupted":
            if model.claimed is None and model.refusal() is None and model.live - model.due:
                model.claimed = set(model.live)
                model.begin()
            with suppress(OSError, UserError):
                run(job, _half)
        elif step == "run":
            model.due |= model.claimed or set()
            model.claimed, refusal = None, model.refusal()
            if refusal is not None:
                with pytest.raises(UserError, match=refusal):
                    run(job)
                continue
            run(job)
            if model.live - model.due:
                model.begin()
            model.due |= model.live
        assert answered(job) == sorted(model.due)


def test_each_run_takes_what_was_appended_since(tables: Tables, checkpoint: Path) -> None:
    job = job_over(tables, checkpoint)
    tables.append(NAME, prompts(0, 3))
    assert estimate(job, backend=InProcess(), seconds=0.1)["rows_left"] == 3
    first = run(job)
    assert [done.result.fresh_rows for done in first.finished] == [3]
    assert run(job).finished == []
    with pytest.raises(NothingLeft, match="no file is new"):
        estimate(job, backend=InProcess())
    tables.append(NAME, prompts(3, 1))
    tables.compact(NAME)
    tables.append(NAME, prompts(4, 1))
    assert estimate(job, backend=InProcess(), seconds=0.1)["rows_left"] == 2
    second = run(job)
    assert [done.result.fresh_rows for done in second.finished] == [2]  # compacted meanwhile: as they were appended
    assert answered(job) == [f"r{row}" for row in range(5)]
    tables.compact(NAME)
    before = sorted(Path(job.output.path).rglob("*"))
    assert run(job).finished == [] and sorted(Path(job.output.path).rglob("*")) == before
    ledger = ledgers.read(open_folder(job.output.path, job.storage))
    assert ledger.runs[0].table == ledger.runs[1].table != ""
    assert ledger.answered_snapshot(ledger.runs[0].table) == ledger.runs[1].snapshot


def test_deleted_rows_and_a_log_that_is_gone_are_refused_by_name(tables: Tables, checkpoint: Path) -> None:
    job = job_over(tables, checkpoint)
    tables.append(NAME, prompts(0, 2))
    run(job)
    since = tables.snapshots(NAME)[-1]
    tables.append(NAME, prompts(2, 2))
    tables.delete(NAME, "id = 'r0'")
    deleting = tables.snapshots(NAME)[-1]
    at, kind = ("snapshot", "overwrite") if tables.kind == "iceberg" else ("version", "DELETE")
    with pytest.raises(UserError) as error:
        run(job)
    assert str(error.value) == (
        f"{tables.path(NAME)}: {at} {deleting} ({kind}) changed or deleted rows since {at} {since}, which the last "
        "successful run answered; answer the whole table into another output.path"
    )
    tables.expire(NAME)
    with pytest.raises(UserError, match=rf"is not known.* since {at} {since}, .* successful run answered|gone"):
        run(job)
    again = with_output(job, path=f"{tables.root}/again")
    run(again)
    assert answered(again) == ["r1", "r2", "r3"]


def test_a_table_made_anew_under_the_same_name_is_answered_whole(tables: Tables, checkpoint: Path) -> None:
    """Delta's versions begin at 0 again: by their numbers alone rows would be taken for answered."""
    job = job_over(tables, checkpoint)
    for first in (0, 1, 2):
        tables.append(NAME, prompts(first, 1))
    run(job)
    if isinstance(tables, IcebergTables):
        tables.catalog.drop_table(NAME)
    else:
        shutil.rmtree(tables.path(NAME))
    tables.append(NAME, prompts(10, 2))
    assert [done.result.fresh_rows for done in run(job).finished] == [2]


def test_a_table_that_went_back_is_refused(tables: Tables, checkpoint: Path) -> None:
    job = job_over(tables, checkpoint)
    for row in range(2):
        tables.append(NAME, prompts(row, 1))
    run(job)
    if isinstance(tables, DeltaTables):
        tables.table(NAME).restore(0)
        why = r"version 2 \(RESTORE\) changed or deleted rows since version 1"
    else:
        with tables.table(NAME).manage_snapshots() as manage:
            manage.rollback_to_snapshot(tables.snapshots(NAME)[0])
        why = r"is not known .* since snapshot \d+.*: .* is not a parent ancestor"
    with pytest.raises(UserError, match=why):
        run(job)


@pytest.mark.parametrize("store", ["disk", "bucket"])
@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_each_run_is_one_snapshot_of_the_output_table(
    kind: str, store: str, checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also after a death between the end of the run and its snapshot, and an abandoned run adds nothing."""
    bucket: StorageConfig | None = request.getfixturevalue("s3") if store == "bucket" else None
    tables = local_tables(kind, tmp_path) if bucket is None else bucket_tables(kind, tmp_path, bucket)
    job = job_over(tables, checkpoint, into_table=True)
    tables.append(NAME, prompts(0, 2))
    run(job)
    assert len(tables.snapshots(OUT)) == 1
    tables.append(NAME, prompts(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "commit_table", _dies)
        with pytest.raises(KeyboardInterrupt):
            run(job)
    assert [one.state for one in ledgers.read(open_folder(job.output.path, job.storage)).runs] == ["success"] * 2
    with pytest.MonkeyPatch.context() as patch:
        append = commit_tables._append
        patch.setattr(commit_tables, "_append", lambda *args: _dies(append(*args)))
        with pytest.raises(KeyboardInterrupt):
            run(job)
    assert len(tables.snapshots(OUT)) == 2
    assert run(job).finished == [] and len(tables.snapshots(OUT)) == 2
    tables.append(NAME, prompts(4, 2))
    with pytest.raises(OSError, match="disk is full"):
        run(job, _half)
    runs.run(job, backend=MadeUpParts(), overwrite=True)
    assert len(tables.snapshots(OUT)) == 3 and len(tables.rows(OUT)) == len(answered(job)) == 6
    assert run(job).finished == []


def _dies(*args: Any) -> None:
    raise KeyboardInterrupt


def _half(shards: Sequence[Shard], folder: Folder, fingerprint: str) -> None:
    commit_made_up_parts(shards[: len(shards) // 2], folder, fingerprint)
    raise OSError("the disk is full")
