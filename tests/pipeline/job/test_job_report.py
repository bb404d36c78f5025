"""The report and the metrics of whole jobs: written with the answers, and never the reason why a job fails."""

from __future__ import annotations

import html
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import answered_rows, files_of, job_config, report, run_in_process
from moved_clock import Clock
from ray_free_run import MadeUpParts
from recorded_metrics import Recorded

from pipeline import job as jobs
from pipeline import metrics
from pipeline.answer import stage
from pipeline.answer.coordinator import Coordinator, RunProgress, Workload
from pipeline.commit.finalize import STATS
from pipeline.commit.runs import RUNS, read_runs, recorded_run
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.metrics import METRICS
from pipeline.report import job_page
from pipeline.report.job_page import REPORT
from pipeline.report.progress import shown_progress
from pipeline.report.summary import print_result
from pipeline.runtime.wide_console import wide_console
from pipeline.storage.folder import LocalFolder, open_folder, write_json


def job(folder: Path, checkpoint: Path, **changes: Any) -> JobConfig:
    """Ten rows, one of them without a prompt."""
    prompts = [None, *(f"alpha {row}" for row in range(9))]
    pq.write_table(pa.table({"id": list(range(10)), "prompt": pa.array(prompts, pa.string())}), folder / "in.parquet")
    own = {"input": {"id": "id"}, "model": {"cache": str(folder / "cache")}, "shard_rows": 4, "price_per_hour": 2.0}
    return job_config(folder / "in.parquet", folder / "out", checkpoint, **own, **changes)


def test_a_job_leaves_its_report_beside_its_answers(tmp_path: Path, checkpoint: Path, reports: None) -> None:
    config, output = job(tmp_path, checkpoint), tmp_path / "out"
    run_in_process(config)
    page = (output / REPORT).read_text()
    assert "all 10 rows are accounted for" in page and "prompt is null" in page and "part-000000.parquet" in page
    first, second = page.index('<td class="long">&lt;s&gt; alpha 0&lt;sep&gt;</td>'), page.index('<h2 id="errors">')
    assert page.index('<h2 id="first-answers">') < first < second  # answers and prompts open it
    (run,) = read_runs(open_folder(str(output), StorageConfig()))
    assert run.ended is not None and run.began <= run.ended and "torch" in run.versions
    summary = json.loads((output / "_job" / "summary.json").read_text())
    assert summary["stopped"] + summary["cut_off"] == 9
    assert run_in_process(config).fresh_rows == 0

    before = files_of(output)
    printed = report(output)
    assert printed.exit_code == 0 and "10 rows in 3 shards" in printed.stdout and files_of(output) == before
    assert "prompt tok  new tok  prefill s  decode s  tok/s" in printed.stdout  # although the terminal is narrow
    elsewhere = report(output, "--html", "--to", str(tmp_path / "r.html"))
    assert elsewhere.exit_code == 0 and files_of(output) == before
    assert report(output, "--html").output.strip() == f"{output}/{REPORT}"
    changed = {path for path, file in files_of(output).items() if before.get(path) != file}
    assert changed == {f"{output}/{REPORT}"}
    (output / STATS).unlink()
    assert report(output, "--write").exit_code == 0
    assert (output / STATS).read_bytes() == before[f"{output}/{STATS}"][2]
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    mine = report(output, "--html", "--to", str(tmp_path / "mine.html"))
    assert mine.exit_code == 2 and (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    for to in (tmp_path, tmp_path / "none" / "r.html"):
        wrong = report(output, "--html", "--to", str(to))
        assert wrong.exit_code == 2 and "give the name of a file in an existing folder" in wrong.output
    wrong = report(output, "--html", "--to", "/dev/full")
    assert wrong.exit_code == 2 and "--to /dev/full: cannot be written: No space left on device" in wrong.output
    wrong = report(output, "--to", "x.html")
    assert wrong.exit_code == 2 and "--to needs --html" in wrong.output
    wrong = report(output, "--html", "--verify")
    assert wrong.exit_code == 2 and "cannot be combined with --verify or --write" in wrong.output


def test_a_labelling_job_says_how_often_each_label_was_chosen(tmp_path: Path, checkpoint: Path, reports: None) -> None:
    """Labels of one token: nothing is said of decode steps, of which there are none."""
    labels = ["alpha", "cheap", "river"]
    config, output = job(tmp_path, checkpoint, choices=labels, sampling={"temperature": 1.0}), tmp_path / "out"
    run_in_process(config)
    answers = [row["generated_text"] for row in answered_rows(output) if row["error"] is None]
    counts = {label: answers.count(label) for label in labels if label in answers}
    summary = json.loads((output / "_job" / "summary.json").read_text())
    assert summary["labels"] == counts and sum(counts.values()) == 9 and summary["decode_steps"] == 0
    printed = report(output).output
    page = (output / REPORT).read_text()
    for label in labels:
        number = counts.get(label, 0)
        assert number == 0 or f"{label} {number} ({number / 9:.1%})" in printed
        assert f'<th scope="row" class="path">{label}</th><td class="number">{number}</td>' in page
    for absent in ("decode s ", "depth", "tok/s"):
        assert absent not in printed
    for absent in ("layer ratio", "tokens/s"):
        assert absent not in page
    assert "for a million answers" in printed
    assert "<p>no decode steps: prefill gives the whole answer</p>" in page and "prompts run" not in page
    for record in (output / "_job" / "commits").iterdir():
        record.unlink()
    assert report(output).exit_code == 0
    assert run_in_process(config).fresh_rows == 0
    assert json.loads((output / "_job" / "summary.json").read_text())["labels"] == counts  # of rebuilt records


def test_prompts_are_shown_as_the_model_read_them(
    tmp_path: Path,
    chat_checkpoint: Path,
    reports: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of what template and chat template make of a row, not its columns; on the page and with `run --show`."""
    monkeypatch.setattr(stage, "END_CHARS", 30)
    texts = ["cheap pub food", "short <b> \x1b[2J", None]
    table = pa.table({"id": ["a", "b", "c"], "a_text": pa.array(texts, pa.string()), "prompt": ["unread"] * 3})
    pq.write_table(table, tmp_path / "in.parquet")
    own = {"input": {"id": "id", "template": "Q: {{ a_text }}", "chat": True}, "output": {"keep": ["prompt"]}}
    config = job_config(tmp_path / "in.parquet", tmp_path / "out", chat_checkpoint, **own)
    done = run_in_process(config)
    page = (tmp_path / "out" / REPORT).read_text()
    ends = re.findall(r'<tr><td class="long">(.*?)</td>', page, flags=re.S)
    assert len(ends) == 3 and len(html.unescape(ends[0])) == 30 and "food" in ends[0] and "Q:" not in ends[0]
    assert ends[1].endswith("&lt;b&gt; \\x1b[2J&lt;/s&gt; [assistant]") and not ends[2]
    assert "unread" not in page
    print_result(wide_console(), open_folder(str(tmp_path / "out"), StorageConfig()), done, 2, StorageConfig())
    shown = capsys.readouterr().out
    assert "<b> \\x1b[2J</s> [assistant]\n" in shown and "\x1b" not in shown and "unread" not in shown


def test_a_report_that_fails_does_not_fail_the_job(
    tmp_path: Path, checkpoint: Path, reports: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytes:
        raise ZeroDivisionError("of the report")

    monkeypatch.setattr(job_page, "job_page", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        done = jobs.run(job(tmp_path, checkpoint), backend=MadeUpParts())
    assert done.totals.rows == 10 and (tmp_path / "out" / "_SUCCESS").exists()
    assert not (tmp_path / "out" / REPORT).exists()
    assert "report.html was not written: ZeroDivisionError: of the report" in caplog.text
    (traceback,) = tmp_path.glob("skipdecode-*.log")
    assert "ZeroDivisionError" in traceback.read_text()


def test_every_end_of_a_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(str(tmp_path), tmp_path)

    def stopped() -> None:
        with recorded_run(folder, 2.0, 100.0):
            assert read_runs(folder)[0].ended is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with recorded_run(folder, 2.0, 200.0):
        pass
    first, second = read_runs(folder)
    assert (first.began, second.began) == (100.0, 200.0) and first.ended is not None and second.ended is not None
    folder.replace(RUNS, b"[1]")  # damaged: the report does without
    assert read_runs(folder) == []

    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(LocalFolder, "replace", full)
    with recorded_run(folder, 2.0, 300.0):
        pass


def test_console_and_page_give_one_cost_and_no_ratio_of_times(tmp_path: Path, checkpoint: Path, reports: None) -> None:
    schedule = {"speedup": 1.5, "unadapted": True}
    config, output = job(tmp_path, checkpoint, schedule=schedule), tmp_path / "out"
    run_in_process(config)
    printed = report(output).stdout
    page = html.unescape((output / REPORT).read_text())
    for begin in ("cost: ", "nominal speed-up: "):
        (line,) = [line for line in printed.splitlines() if line.startswith(begin)]
        assert f"<p>{line}</p>" in page
    assert "wall-clock speed-up" not in printed + page  # the job has not run at full depth


@pytest.mark.parametrize("before", [{}, {"torch": "1.0", "skipdecode": "0.0.1"}])
def test_a_run_that_goes_on_under_other_versions_names_them_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any
) -> None:
    folder = LocalFolder(str(tmp_path), tmp_path)
    with recorded_run(folder, 2.0, 100.0):
        pass
    (run,) = read_runs(folder)
    write_json(folder, RUNS, [asdict(replace(run, versions={**run.versions, **before}))])
    with recorded_run(folder, 2.0, 200.0):
        pass
    lines = [line for line in caplog.messages if "other versions" in line]
    assert len(lines) == bool(before) and all(f"{name} {old} -> " in lines[0] for name, old in before.items())


DRIVER = {"job_rows", "job_rows_done", "eta_seconds"}
STORE = {"store_retries"}  # tests/pipeline/storage/test_s3.py


def config(folder: Path, checkpoint: Path) -> JobConfig:
    pq.write_table(pa.table({"id": range(20), "prompt": [None, *["alpha bravo"] * 19]}), folder / "in.parquet")
    own = {"input": {"id": "id"}, "actors": {"max_batch": 4}, "shard_rows": 5, "price_per_hour": 3600.0}
    return job_config(folder / "in.parquet", folder / "out", checkpoint, **own)


def test_the_metrics_of_a_job_are_its_totals(tmp_path: Path, checkpoint: Path) -> None:
    recorded = Recorded()
    with metrics.installed(recorded):
        totals = run_in_process(config(tmp_path, checkpoint)).totals
    found = recorded.counters
    assert found["rows"] == totals.rows == 20 and found["row_errors"] == totals.errors == 1
    for name in ("generated_tokens", "decode_steps", "layer_steps"):
        assert found[name] == getattr(totals, name) > 0
    assert found["prompt_tokens"] == totals.padded_prompt_tokens - totals.padding_tokens > 0
    for part in ("prepare", "prefill", "decode", "commit"):
        seconds = getattr(totals, f"{part}_seconds")
        assert found[f"seconds/{part}"] == pytest.approx(seconds) and seconds > 0
    assert totals.money == pytest.approx(totals.device_seconds) == pytest.approx(totals.generate_seconds)
    names = {name.split("/")[0] for name in found} | recorded.gauges.keys()
    assert names == METRICS.keys() - DRIVER - STORE


def test_the_driver_sets_the_jobs_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, coordinator, recorded = Clock(), Coordinator(), Recorded()
    monkeypatch.setattr("pipeline.report.progress.time", clock)
    with metrics.installed(recorded), shown_progress(coordinator, Workload(8, 1000, 1, 50)) as progress:
        progress.seen.append((clock.now - 10, RunProgress()))
        coordinator.begin(0)
        coordinator.ended(0, True, 100, 0, 500)
    assert recorded.gauges.keys() == DRIVER
    assert (recorded.gauges["job_rows"], recorded.gauges["job_rows_done"]) == (1000, 150)
    assert recorded.gauges["eta_seconds"] == pytest.approx(85)
