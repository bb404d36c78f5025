"""The JSON that speed.py writes (--out) as a chart: tokens a second of everyone, by shape and workload.

.venv/bin/python tests/benchmarks/chart.py work/speed.json CHART.png [--shapes opt-125m] [--workloads e2e]
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

WIDTH, DPI = 9.0, 200  # inches, dots an inch: twice as many dots as the README shows
BAR, FRAME = 0.2, 0.8  # inches of height: of a bar, and around a panel's bars
NAMES = {
    "transformers": "transformers",
    "static": "transformers, static, compiled",
    "continuous": "transformers, continuous",
    "vllm": "vLLM",
    "ctranslate2": "CTranslate2 fp32",
    "ctranslate2-int8": "CTranslate2 int8",
}
LENGTHS = {
    "prompt-heavy": "64 + 64 tokens",
    "decode-heavy": "32 + 256 tokens",
    "e2e": "E2E lengths",
    "qmsum": "QMSum lengths",
    "long-tailed": "long-tailed lengths",
}
COLOURS = {"lock_step": "#0072b2", "refill": "#56b4e9", "peer": "#e69f00"}  # Okabe and Ito's, for all eyes
SCHEDULERS = {"lock_step": "engine, lock-step", "refill": "engine, refill"}


def label(name: str) -> str:
    """A contestant's name for people."""
    return NAMES.get(name, " ".join(name.split()[:2]))


def kind(name: str) -> str:
    """Whose bar it is: a key of COLOURS."""
    return "peer" if name in NAMES else name.split()[-1]


def draw(panel: Axes, title: str, found: dict[str, dict[str, Any]]) -> None:
    """Bars of one shape and workload; a tick where the engine's ideal would be."""
    rates = [one["tokens_per_second"] for one in found.values()]
    panel.barh(range(len(found)), rates, height=0.75, color=[COLOURS[kind(name)] for name in found])
    most = max(rates)
    for place, (name, one) in enumerate(found.items()):
        end = rates[place]
        if "ideal_speedup" in one:
            ideal = found[f"engine 1x {kind(name)}"]["tokens_per_second"] * one["ideal_speedup"]
            end = max(end, ideal)
            most = max(most, end)
            if one["ideal_speedup"] > 1:
                tick = panel.plot([ideal, ideal], [place - 0.42, place + 0.42], color="black", linewidth=1.6)[0]
                tick.set_path_effects([withStroke(linewidth=3.2, foreground="white")])
        panel.annotate(
            f"{rates[place]:,.0f}", (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    panel.set_xlim(0, 1.17 * most)
    panel.set_yticks(range(len(found)), [label(name) for name in found], fontsize=8)
    panel.invert_yaxis()
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True))
    panel.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    panel.set_xlabel("new tokens a second, whole run", fontsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)


def caption(results: dict[str, Any], shapes: list[str]) -> str:
    """Hardware, versions, command."""
    facts = results["facts"]
    versions = {
        f"{label(name)} {peer['version']}"
        for shape in shapes
        for name, peer in results["shapes"][shape]["peers"].items()
    }
    text = (
        f"{facts['machine']}, {facts['threads']} threads, {facts['flops_per_second'] / 1e9:,.0f} GFLOP/s and "
        f"{facts['bytes_per_second'] / 1e9:,.0f} GB/s measured. Random weights, bfloat16, greedy, {facts['rows']} "
        f"rows, at most {facts['max_rows']} at once; median of {facts['runs']} rounds in turn, warm-up left out. "
        f"Engine: torch {facts['torch']}, torch.compile {facts['compile']}. {'; '.join(sorted(versions))}. "
        f"{facts['command']}"
    )
    return textwrap.fill(text, 140)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--shapes", type=lambda text: text.split(","), help="all, if not given")
    parser.add_argument("--workloads", type=lambda text: text.split(","), help="all, if not given")
    options = parser.parse_args()
    results = json.loads(options.json.read_text())
    shapes = [name for name in results["shapes"] if options.shapes is None or name in options.shapes]
    found = [
        (f"{shape}, {LENGTHS[workload]}", one)
        for shape in shapes
        for workload, one in results["shapes"][shape]["workloads"].items()
        if options.workloads is None or workload in options.workloads
    ]
    if not found:
        parser.error(f"{options.json}: it holds none of these shapes and workloads")
    rows = [found[first : first + 2] for first in range(0, len(found), 2)]
    heights = [max(len(one) for _, one in row) * BAR + FRAME for row in rows]
    figure = plt.figure(figsize=(WIDTH, sum(heights) + 1.1), layout="constrained")
    head, body, foot = figure.subfigures(3, 1, height_ratios=[0.35, sum(heights), 0.75])
    grid = body.subplots(len(rows), min(2, len(found)), squeeze=False, height_ratios=heights)
    for panels, row in zip(grid, rows, strict=True):
        for panel, one in zip(panels, row, strict=False):
            draw(panel, *one)
        for panel in panels[len(row) :]:
            panel.set_axis_off()
        if len(row) == 2 and list(row[0][1]) == list(row[1][1]):
            panels[1].set_yticklabels([])
    kinds = [one for one in COLOURS if any(kind(name) == one for _, panel in found for name in panel)]
    handles: list[Any] = [Patch(color=COLOURS[one], label=SCHEDULERS.get(one, "others")) for one in kinds]
    handles.append(Line2D([], [], color="black", marker="|", markersize=11, markeredgewidth=1.6, linestyle=""))
    handles[-1].set_label("ideal: 1x with the skipped work taken off")
    head.legend(handles=handles, loc="center", ncols=len(handles), frameon=False, fontsize=8.5)
    foot.text(0.01, 0.5, caption(results, shapes), fontsize=7.5, va="center", color="#444444")
    figure.savefig(options.png, dpi=DPI)


if __name__ == "__main__":
    main()
