"""When the actors of a job were at work on shards, and when they waited between two of them: a table and a picture.

    .venv/bin/python tests/benchmarks/timeline.py OUTPUT [--picture OUTPUT/_job/timeline.png]

OUTPUT: a finished job's local folder; its `_job/stats.parquet` tells start and end of each shard. Which actor had a
shard it does not tell: shards of a node are laid into as many lanes as were ever at work there at once, each into the
lane that has waited longest. The sum of all waits does not hang on that. Restarted jobs show their pauses as waits.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Lane = list[dict[str, Any]]  # shards, by time
Lanes = Mapping[str, Lane]


def read(output: Path) -> list[dict[str, Any]]:
    """Statistics of the job's shards. ValueError if there are none with times."""
    file = output / "_job" / "stats.parquet"
    if not file.exists():
        raise ValueError(f"{file}: not there; give the output folder of a finished job")
    shards = [shard for shard in pq.read_table(file).to_pylist() if not shard["rebuilt"]]
    if not shards:
        raise ValueError(f"{file}: no shard with times: all records were made again from their parts")
    return shards


def lanes(shards: Sequence[dict[str, Any]]) -> Lanes:
    """Shards by the lane, one an actor, in which they were answered."""
    nodes: defaultdict[str, list[Lane]] = defaultdict(list)
    for shard in sorted(shards, key=lambda one: one["started"]):
        node = nodes[f"{shard['node']} {shard['device']}"]
        free = [lane for lane in node if lane[-1]["finished"] <= shard["started"]]
        if free:
            min(free, key=lambda lane: lane[-1]["finished"]).append(shard)
        else:
            node.append([shard])
    return {f"{node}, {number}": lane for node, found in nodes.items() for number, lane in enumerate(found)}


def figures(found: Lanes) -> dict[str, dict[str, float]]:
    """Of each lane: shards, seconds at work, seconds waited between shards, the longest wait, and the share of waits;
    before and after: seconds from the job's first start to the lane's, and from the lane's end to the job's."""
    first = min(lane[0]["started"] for lane in found.values())
    last = max(lane[-1]["finished"] for lane in found.values())
    told = {}
    for name, lane in found.items():
        waits = [after["started"] - before["finished"] for before, after in pairwise(lane)]
        busy = sum(shard["finished"] - shard["started"] for shard in lane)
        told[name] = {
            "shards": len(lane),
            "busy": busy,
            "idle": sum(waits),
            "longest": max(waits, default=0.0),
            "share": sum(waits) / (sum(waits) + busy),
            "before": lane[0]["started"] - first,
            "after": last - lane[-1]["finished"],
        }
    return told


def table(found: Lanes) -> str:
    """For people."""
    told = figures(found)
    width = max(len(name) for name in told)
    lines = [f"{'lane':{width}s} shards   at work  waited between  longest wait   share  before first  after last"]
    for name, one in told.items():
        lines.append(
            f"{name:{width}s} {one['shards']:6d} {one['busy']:7.1f} s {one['idle']:13.3f} s {one['longest']:11.3f} s "
            f"{one['share']:7.2%} {one['before']:11.1f} s {one['after']:9.1f} s"
        )
    return "\n".join(lines)


def draw(found: Lanes, file: Path) -> None:
    """A bar a shard, a row a lane; waits are what stays white."""
    from matplotlib import pyplot

    first = min(lane[0]["started"] for lane in found.values())
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.5 * len(found)), layout="constrained")
    for row, lane in enumerate(found.values()):
        bars = [(shard["started"] - first, shard["finished"] - shard["started"]) for shard in lane]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=["tab:blue", "tab:cyan"])
        for shard, (start, seconds) in zip(lane, bars, strict=True):
            axes.text(start + seconds / 2, row, str(shard["shard"]), ha="center", va="center", clip_on=True)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first shard began; a number is a shard's")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    try:
        found = lanes(read(given.output))
    except ValueError as error:
        parser.error(str(error))
    print(table(found))
    picture = given.picture or given.output / "_job" / "timeline.png"
    draw(found, picture)
    print(f"picture: {picture}")
    print(json.dumps(figures(found)))


if __name__ == "__main__":
    main()
