"""`skipdecode run` with input.since, from the job file to the dated folders; most of it without Ray and a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import assert_released
from click.testing import Result
from in_process import invoke, job_values
from parquet_damage import UNREADABLE, write_unreadable
from part_builders import to_table
from ray_free_run import Answer, MadeUpParts, commit_made_up_parts
from typer.testing import CliRunner

from pipeline import job as jobs
from pipeline import nightly
from pipeline.answer.stats import add_up
from pipeline.cli.app import app
from pipeline.commit.lease import Lease
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard
from pipeline.nightly import Run
from pipeline.runtime.signals import Interrupted
from pipeline.storage.folder import Folder, filesystem, open_folder


class Inbox:
    """Input files that grow, and the command over them."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.files, self.root = folder, folder / "in", folder / "root"
        self.files.mkdir()
        source, sampling = {"since": "last_success", "id": "id"}, {"max_new_tokens": 4}
        self.values = job_values(self.files, self.root, checkpoint, input=source, sampling=sampling, shard_rows=2)

    def add(self, name: str, rows: int = 3) -> None:
        values = [{"id": f"{name}-{row}", "prompt": "alpha bravo"} for row in range(rows)]
        table = pa.Table.from_pylist(values, pa.schema([("id", pa.string()), ("prompt", pa.string())]))
        pq.write_table(table, self.files / f"{name}.parquet")

    def run(self, *options: str) -> Result:
        return invoke(self.folder, self.values, *options)

    def json(self, *options: str) -> dict[str, Any]:
        result = self.run("--json", *options)
        assert result.exit_code == 0, result.output
        values: dict[str, Any] = json.loads(result.stdout)
        return values

    def refused(self, *options: str) -> str:
        result = self.run(*options)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        return line.removeprefix(f"skipdecode: {self.folder / 'job.yaml'}: ")

    def answered(self) -> list[str]:
        """Ids in the folders of the runs that count."""
        folders = [path.parent for path in self.root.glob("*/_SUCCESS")]
        return sorted(row for folder in folders for row in pq.read_table(folder)["id"].to_pylist())

    def runs(self) -> Sequence[Run]:
        return nightly.read(self.opened()).runs

    def states(self) -> list[str]:
        left = nightly.unfinished(self.opened(), nightly.read(self.opened()))
        return [run.state for run in self.runs()] + ["unfinished"] * len(left)

    def opened(self) -> Folder:
        return open_folder(str(self.root), StorageConfig())


@pytest.fixture
def inbox(tmp_path: Path, checkpoint: Path) -> Inbox:
    return Inbox(tmp_path, checkpoint)


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, BaseException | None], None]:
    """Parts without a model, from each run on; from then on it stops after `count` shards with `error`."""

    def behave(count: int | None = None, error: BaseException | None = None) -> None:
        def answer(shards: Sequence[Shard], folder: Folder, fingerprint: str) -> None:
            for shard in shards:
                table = pq.read_table(shard.url).slice(shard.first_row, shard.rows)
                assert table.num_rows == shard.rows
            commit_made_up_parts(shards[:count], folder, fingerprint)
            if error is not None:
                raise error

        answer_by(monkeypatch, answer)

    behave()
    return behave


def answer_by(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(jobs, "ray_backend", lambda **_: MadeUpParts(answer))


def test_row_errors_are_not_forgotten_by_the_next_command(inbox: Inbox, flow: Any) -> None:
    """A scheduler that retries after exit 3 must not read success from "nothing new"."""
    inbox.add("a")
    inbox.values["shard_rows"] = 3
    inbox.values["max_error_rate"] = 0.1  # one row of three is bad
    first = inbox.run()
    assert first.exit_code == 3 and "run 1 has too many row errors and does not count" in first.stdout
    assert inbox.states() == ["unfinished"] and inbox.answered() == []
    again = inbox.run("--json")
    assert again.exit_code == 3 and json.loads(again.stdout)["last_success"] is None
    assert inbox.states() == ["abandoned", "unfinished"] and inbox.answered() == []
    inbox.add("b")
    (one, other) = inbox.json("--set", "max_error_rate=0.5")["runs"]  # accepts the run, and answers nothing again
    assert (one["run"], one["resumed"], one["fresh_rows"], one["state"]) == (2, True, 0, "success")
    assert (other["run"], other["fresh_rows"]) == (3, 3) and inbox.states() == ["abandoned", "success", "success"]


def test_a_run_that_died_before_its_success_stops_no_later_one(
    inbox: Inbox, flow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    record, part, plan = "_job/commits/000000.json", "part-000000.parquet", "_job/plan.pq"
    cases = [
        ([record], ""),
        ([record, part], f"{part} is missing: run "),
        ([plan], f"{plan}: missing; restore the file"),
    ]
    for number, (lost, says) in enumerate(cases):
        inbox.add(str(number))
        assert len(inbox.json()["runs"]) == 1
        success = max(inbox.root.glob("*/_SUCCESS"))
        for name in ["_SUCCESS", *lost]:
            (success.parent / name).unlink()
        assert inbox.json()["runs"] == [] and success.exists() == (not says)
        assert bool(re.search(rf"gets no _SUCCESS: \S*{says}", caplog.text)) == bool(says)


def test_parts_of_finished_runs_are_checked_and_repaired_where_this_is_asked_for(
    in_process: None, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.add("a", 3)
    inbox.json()
    inbox.add("b", 2)
    inbox.json()
    before = inbox.answered()
    first, second = (sorted(path.parent.glob("part-*.parquet")) for path in sorted(inbox.root.glob("*/_SUCCESS")))
    data = bytearray(first[0].read_bytes())
    data[len(data) // 2] ^= 1
    first[0].write_bytes(data)
    second[-1].unlink()
    assert inbox.json()["runs"] == []  # nothing new, and nothing is read
    assert f"{first[0]}: damaged (sha256 differs" in inbox.refused("--verify")
    repaired = inbox.json("--repair")["runs"]
    assert [run["run"] for run in repaired] == [1, 2] and all(run["resumed"] for run in repaired)
    assert inbox.answered() == before and "which had lost output files, is now finished" in caplog.text
    assert inbox.json("--verify")["runs"] == []
    first[0].unlink()
    assert inbox.json("--repair")["last_success"] == 2


def test_each_run_takes_what_came_since_and_says_so(inbox: Inbox, flow: Any) -> None:
    inbox.add("a")
    inbox.add("b", 5)
    first = inbox.json()
    assert [(run["run"], run["files"], run["rows"], run["resumed"]) for run in first["runs"]] == [(1, 2, 8, False)]
    assert (first["output"], first["fresh_rows"], first["last_success"]) == (str(inbox.root), 8, 1)
    inbox.add("c", 1)
    result = inbox.run()
    assert result.exit_code == 0 and "run 2 finished, input files: 1" in result.stdout
    folders = sorted(path.parent.name for path in inbox.root.glob("*/_SUCCESS"))
    assert len(folders) == 2 and all(name[:2] == "20" for name in folders)
    assert f"answers: {inbox.root / folders[1]}/part-*.parquet" in result.stdout
    assert pq.read_table(inbox.root / folders[1]).num_rows == 1

    before = sorted(path for path in inbox.root.rglob("*") if path.parent.name != "lease")
    last = inbox.runs()[1]
    result = inbox.run()
    assert result.exit_code == 0 and result.stdout == f"nothing new since run 2 ({last.folder})\n"
    assert inbox.json() == {"output": str(inbox.root), "last_success": 2, "fresh_rows": 0, "left": [], "runs": []}
    for path in inbox.files.iterdir():
        path.unlink()  # archived, all of it
    assert inbox.json()["runs"] == []
    assert sorted(path for path in inbox.root.rglob("*") if path.parent.name != "lease") == before

    shown = CliRunner().invoke(app, ["report", str(inbox.root)])
    assert shown.exit_code == 0 and "3 files and 9 rows answered in 2 runs" in shown.stdout
    refused = CliRunner().invoke(app, ["report", str(inbox.root), "--html"])
    assert refused.exit_code == 2 and "name a dated folder" in refused.output
    shown = CliRunner().invoke(app, ["report", str(inbox.root / folders[0])])
    assert shown.exit_code == 0 and "8 rows in 5 shards" in shown.stdout


def test_a_failed_run_is_finished_by_the_next_which_then_takes_what_is_new(inbox: Inbox, flow: Any) -> None:
    inbox.add("a", 6)
    flow(1, OSError("the disk is full"))
    result = inbox.run()
    assert result.exit_code == 1 and "resumes the job" in result.stderr
    assert inbox.states() == ["unfinished"] and inbox.answered() == []
    inbox.add("b")
    flow()
    inbox.values["actors"] = {"count": 3, "threads": 1}  # neither is part of the job
    inbox.values["input"]["changed"] = "ignore"
    done = inbox.json()
    assert [(run["run"], run["resumed"], run["rows"], run["fresh_rows"]) for run in done["runs"]] == [
        (1, True, 6, 4),
        (2, False, 3, 3),
    ]
    assert inbox.states() == ["success", "success"] and len(inbox.answered()) == 9
    assert_released(inbox.root)


def test_a_job_that_changed_after_an_interrupt_gives_the_run_up(
    inbox: Inbox, flow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.add("a", 6)
    flow(1, Interrupted("SIGTERM"))
    assert inbox.run().exit_code == 4
    flow()
    inbox.values["sampling"] = {"max_new_tokens": 5}
    assert inbox.run().exit_code == 0
    assert "abandoned (the job has changed in sampling.max_new_tokens)" in caplog.text
    assert inbox.states() == ["abandoned", "success"] and len(inbox.answered()) == 6
    inbox.values["sampling"] = {"max_new_tokens": 4}  # what is answered stays so, whatever the job becomes
    assert inbox.json()["runs"] == []


def test_what_is_wrong_with_the_input_is_one_line(inbox: Inbox, flow: Any, caplog: pytest.LogCaptureFixture) -> None:
    inbox.values["input"]["path"] = str(inbox.folder / "typo")
    assert inbox.refused() == f"{inbox.folder / 'typo'}: no such file or folder"
    inbox.values["input"]["path"] = str(inbox.files)
    assert inbox.refused() == f"{inbox.files}: folder without .parquet files"
    inbox.add("a")
    assert inbox.refused("--limit", "2").startswith("--limit: rows beyond the limit would never be answered")
    inbox.json()
    (inbox.files / "b.parquet").write_bytes(b"PAR1 half")
    assert inbox.refused().startswith(f"{inbox.files / 'b.parquet'}: not readable as Parquet")
    (inbox.files / "b.parquet").unlink()
    inbox.add("empty", 0)
    result = inbox.run()
    assert result.exit_code == 0 and "nothing new since run 1" in result.stdout
    assert "1 new files hold no readable rows, and are left for a later run" in caplog.text
    inbox.add("a", 4)
    assert inbox.refused().startswith(f"{inbox.files / 'a.parquet'}: changed since run 1 answered it (")
    assert inbox.json("--set", "input.changed=ignore")["runs"] == []
    assert [run["rows"] for run in inbox.json("--set", "input.changed=reprocess")["runs"]] == [4]
    assert inbox.states() == ["success", "success"]


def test_an_unreadable_file_is_left_for_a_later_run_which_the_ledger_names(inbox: Inbox, flow: Any) -> None:
    bad, lacking = inbox.files / "b.parquet", inbox.files / "c.parquet"
    inbox.add("a")
    bad.write_bytes(b"PAR1 half")
    pq.write_table(pa.table({"id": ["c"], "question": ["no prompt"]}), lacking)
    assert inbox.refused().startswith(f"{bad}: not readable as Parquet")
    inbox.values["input"]["unreadable"] = "later"
    told = inbox.json()
    assert told["left"] == [str(bad), str(lacking)] and [run["files"] for run in told["runs"]] == [1]
    (run,) = inbox.runs()
    assert run.left == (str(bad), str(lacking)) and [file.url for file in run.files] == [f"{inbox.files}/a.parquet"]
    shown = inbox.run().stdout
    assert f"left for a later run: {bad}, {lacking}" in shown and "nothing new since run 1" in shown
    inbox.add("b")
    inbox.add("c")
    told = inbox.json()
    assert told["left"] == [] and [run["rows"] for run in told["runs"]] == [6]
    assert len(inbox.answered()) == 9
    inbox.values["input"].update(since=None)
    assert "unreadable is for incremental runs: add since: last_success" in inbox.run().stderr


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_file_whose_data_cannot_be_read_is_left_whole(inbox: Inbox, flow: Any, what: str) -> None:
    bad = inbox.files / "b.parquet"
    write_unreadable(bad, what)
    inbox.add("a")
    if what != "page":
        assert inbox.refused().startswith(f"{bad}: column 'prompt' cannot be read (")
        assert not (inbox.root / "_ledger").exists()
    inbox.values["input"]["unreadable"] = "later"
    told = inbox.json()
    assert told["left"] == [str(bad)] and [run["rows"] for run in told["runs"]] == [3]
    assert inbox.json() == {**told, "fresh_rows": 0, "runs": []}
    inbox.add("b")
    assert [run["rows"] for run in inbox.json()["runs"]] == [3] and len(inbox.answered()) == 6


def test_a_damaged_page_that_is_met_ends_the_run_until_the_file_is_replaced(in_process: None, inbox: Inbox) -> None:
    bad = inbox.files / "b.parquet"
    write_unreadable(bad, "page")
    inbox.add("a")
    inbox.values["shared_prefix"], inbox.values["max_error_rate"] = False, 1
    said = inbox.refused()
    assert said.startswith(f"{bad}: cannot be read, since it is damaged") and "replace the file" in said
    inbox.add("b")
    assert "changed since the job began" in inbox.refused() and inbox.answered() == []
    assert [run["rows"] for run in inbox.json("--overwrite")["runs"]] == [6]


def test_plain_jobs_and_incremental_runs_do_not_share_a_folder(inbox: Inbox, flow: Any) -> None:
    inbox.add("a")
    inbox.json()
    del inbox.values["input"]["since"]
    for options in ((), ("--overwrite",)):
        assert "holds incremental runs; set input.since to last_success" in inbox.refused(*options)
    inbox.values["output"]["path"] = str(inbox.folder / "plain")
    assert inbox.run().exit_code == 0
    inbox.values["input"]["since"] = "last_success"
    assert "holds files that no incremental run wrote" in inbox.refused()
    inbox.values["output"]["path"] = str(inbox.files / "root")
    assert "lies in the input folder" in inbox.refused()


def test_a_run_while_another_is_at_work_is_exit_5(inbox: Inbox, flow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox.add("a")
    other = Lease(open_folder(str(inbox.root), StorageConfig()), beat=1, watch=10)
    other.acquire(lambda: None)
    try:
        result = inbox.run()
    finally:
        other.release()
    assert result.exit_code == 5 and "another run holds" in result.stderr
    assert not (inbox.root / "_ledger").exists()

    def overtake(*args: Any) -> None:
        (name,) = nightly.unfinished(inbox.opened(), nightly.read(inbox.opened()))
        nightly.record(inbox.opened(), nightly.read(inbox.opened()), name, "abandoned", None, "--overwrite")
        flow()
        assert inbox.states() == ["abandoned"]

    answer_by(monkeypatch, overtake)
    monkeypatch.setattr(jobs, "finalize", lambda *_: add_up(to_table([])))
    result = inbox.run()
    assert result.exit_code == 5 and "another command has recorded run 1 meanwhile" in result.stderr
    assert inbox.answered() == []


def test_real_answers_from_and_to_a_bucket(in_process: None, inbox: Inbox, s3: StorageConfig, reports: None) -> None:
    """Run; a file comes and the run over it fails; it is finished; nothing is new; all of it is archived."""
    bucket, root = open_folder("s3://bucket/inbox", s3), open_folder("s3://bucket/root", s3)
    inbox.values |= {"storage": s3.model_dump(exclude_none=True), "output": {"path": root.url}}
    inbox.values["input"]["path"] = bucket.url

    def arrives(name: str, rows: int) -> None:
        inbox.add(name, rows)
        bucket.replace(f"{name}.parquet", (inbox.files / f"{name}.parquet").read_bytes())

    arrives("a", 2)
    arrives("b", 1)
    assert [run["rows"] for run in inbox.json()["runs"]] == [3]

    arrives("c", 4)

    def dies(*args: Any) -> None:
        raise OSError("no more disk")

    with pytest.MonkeyPatch.context() as patch:
        answer_by(patch, dies)
        assert inbox.run().exit_code == 1
    assert [(run["run"], run["resumed"], run["fresh_rows"]) for run in inbox.json()["runs"]] == [(2, True, 4)]

    for name in bucket.names():
        bucket.remove(name)
    assert inbox.json()["runs"] == []
    runs = nightly.read(root).runs
    assert [[Path(file.url).name for file in run.files] for run in runs] == [["a.parquet", "b.parquet"], ["c.parquet"]]
    ids: list[str] = []
    for run in runs:
        fs, path = filesystem(f"{root.url}/{run.folder}", s3)
        assert fs.exists(f"{path}/_SUCCESS") and b"rows are accounted for" in fs.cat(f"{path}/_job/report.html")
        table = pq.read_table(path, filesystem=fs)
        assert table["generated_text"].null_count == 0
        ids += table["id"].to_pylist()
    assert sorted(ids) == ["a-0", "a-1", "b-0", "c-0", "c-1", "c-2", "c-3"]


def test_runs_of_the_same_second_have_folders_of_their_own(
    inbox: Inbox, flow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "_now", lambda: "2026-11-20T16:40:05Z")
    for name in ("a", "b", "c"):
        inbox.add(name)
        inbox.json()
    assert [run.folder for run in inbox.runs()] == [f"2026-11-20T16-40-05Z{end}" for end in ("", "-2", "-3")]
