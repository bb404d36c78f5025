"""The report of a root: each run with rows, time, errors; of many runs the newest."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from part_builders import manifest_of

from pipeline.config.job import StorageConfig
from pipeline.incremental import ledger as ledgers
from pipeline.incremental import root_page as pages
from pipeline.incremental.root_page import root_page
from pipeline.input.shards import Shard
from pipeline.storage.folder import Folder, open_folder

LOCAL = StorageConfig()


@pytest.fixture
def root(tmp_path: Path) -> Folder:
    """Three runs: of 5 rows, abandoned, of 7 rows whose folder is gone; then one at work."""
    root = open_folder(str(tmp_path / "root"), LOCAL)
    for rows, state in ((5, "success"), (6, "abandoned"), (7, "success"), (8, None)):
        manifest = replace(manifest_of([Shard(0, f"in/{rows}.parquet", 0, rows)]), fingerprint=f"{rows}" * 64)
        run = ledgers.claim(root, ledgers.read(root), manifest)
        if state == "success" and rows == 5:
            root.replace(f"{run.folder}/_SUCCESS", json.dumps({"errors": 2, "generated_tokens": 1234}).encode())
        if state is not None:
            ledgers.end(root, run, state, "<b>why</b>" if state == "abandoned" else "")
    return root


def text_of(page: bytes) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.decode()))


def test_each_run_is_told(root: Folder) -> None:
    page = root_page(root, LOCAL)
    text = text_of(page)
    assert "12 rows of 2 input files are answered in 2 runs; 2 runs are abandoned or unfinished." in text
    assert "abandoned : &lt;b&gt;why&lt;/b&gt;" in text and b"<b>why" not in page
    assert re.search(r"success 1 5 2 1,234 ", text) and re.search(r"success 1 7 ", text)
    assert len(ledgers.read(root).runs) == 4 and page.count(b"<svg") == 4 and b"<script" not in page
    (link,) = re.findall(rb'href="(\.\./[^"]+)"', page)
    assert link.endswith(b"/_job/report.html")


def test_of_many_runs_the_newest_are_shown(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SHOWN_RUNS", 2)
    assert [line["run"].number for line in pages.run_lines(root, LOCAL, ledgers.read(root))] == [3, 4]
    assert "The newest 2 of 4 runs" in text_of(root_page(root, LOCAL))
