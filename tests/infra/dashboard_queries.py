"""The Grafana dashboard's panels and queries."""

from __future__ import annotations

import json
from typing import Any

from infra_files import INFRA

DASHBOARD, SCRAPE = INFRA / "grafana-dashboard.json", INFRA / "prometheus.yml"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> dict[str, str]:
    """Each query as Prometheus gets it, by panel and reference."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "1m").replace("$output", ".*")
        for panel in panels()
        for target in panel["targets"]
    }
