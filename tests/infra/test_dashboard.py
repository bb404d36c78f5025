"""The Grafana dashboard asks for the metrics that jobs have; `test_scraped_job` asks a Prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from infra_files import DASHBOARD, ROOT, SCRAPE, panels, queries

from pipeline.metrics import METRICS

EXPORTED = {f"ray_skipdecode_{name}" + "_total" * (metric.kind == "counter") for name, metric in METRICS.items()}
LABELS = {"output", "part"}


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    text = DASHBOARD.read_text()
    assert set(re.findall(r"ray_\w+", text)) == EXPORTED
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= LABELS
    for expr in queries().values():
        assert "$" not in expr, "a variable that the dashboard does not define"
        assert {name for group in re.findall(r"by \(([\w, ]+)\)", expr) for name in group.split(", ")} <= LABELS


def test_the_readme_lists_every_metric() -> None:
    section = (ROOT / "pipeline" / "README.md").read_text().partition("## Watching a job")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section, re.M)
    assert {name for name, _, _ in lines} == EXPORTED
    assert [(kind, text) for _, kind, text in lines] == [(metric.kind, metric.text) for metric in METRICS.values()]


def test_panels_have_places_and_names_of_their_own() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len({panel["title"] for panel in found}) == len(found)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in found
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_the_scrape_file_reads_the_list_that_ray_keeps() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_promtool_accepts_the_scrape_file() -> None:
    checked = subprocess.run(["promtool", "check", "config", SCRAPE], capture_output=True, text=True, timeout=600)
    assert checked.returncode == 0, checked.stderr
