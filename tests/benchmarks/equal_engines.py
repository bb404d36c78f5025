"""How much engines of equal weights differ in the same steps: with weights in huge pages, and where malloc puts them.

    .venv/bin/python tests/benchmarks/equal_engines.py [--checkpoint work/real/model] [--rows 1,8] [--threads 1]

Each round makes the engines anew and runs their steps in turn, in an order of its own. Milliseconds of a step: medians
over the rounds' medians, of wall clock and of this thread's processor time, and the least and most of the rounds. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any
from unittest import mock

from actors.engine.cpu import huge_pages
from actors.engine.engine import Engine
from actors.engine.types import Request, SamplingParams
from actors.generator import Generator

KINDS = ("huge pages", "huge pages, again", "malloc", "malloc, again")
PROMPT, STEPS, TURNS = 40, 40, 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="configs/demo/checkpoint")
    parser.add_argument("--rows", default="1,8", help="in flight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    counts = list(map(int, given.rows.split(",")))
    found: dict[tuple[int, str], list[tuple[float, float]]] = {(rows, kind): [] for rows in counts for kind in KINDS}
    for number in range(given.rounds):
        engines = {kind: _engine(given, huge=kind.startswith("huge")) for kind in KINDS}
        order = random.Random(number).sample(KINDS, len(KINDS))
        for rows in counts:
            steps: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for kind in order * TURNS:
                steps[kind] += _steps(engines[kind], rows)
            for kind in KINDS:
                wall, processor = (statistics.median(column) for column in zip(*steps[kind], strict=True))
                found[rows, kind].append((wall, processor))
    lines: list[dict[str, Any]] = []
    for (rows, kind), rounds in found.items():
        wall, processor = (list(column) for column in zip(*rounds, strict=True))
        middle = statistics.median(processor)
        lines.append({"rows": rows, "kind": kind, "wall_ms": statistics.median(wall), "processor_ms": middle})
        spread = f"{min(processor) / middle:.2f} to {max(processor) / middle:.2f}"
        print(f"{rows:3} rows  {kind:18} {statistics.median(wall):7.3f} ms  processor {middle:7.3f} ms ({spread})")
    print(json.dumps(lines))


def _engine(given: argparse.Namespace, *, huge: bool) -> Engine:
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": given.threads, "schedule": {"speedup": 1.0}}
    with mock.patch.object(huge_pages, "move", huge_pages.move if huge else lambda products: None):
        engine = Generator(given.checkpoint, cumulative_logprob=False, **options).engine
    assert isinstance(engine, Engine) and engine.decoder.stack is not None, "no kernels of all layers here"
    return engine


def _steps(engine: Engine, rows: int) -> list[tuple[float, float]]:
    """Milliseconds of some steps of greedy rows: wall clock, and this thread's processor time."""
    sampling = SamplingParams(max_new_tokens=STEPS + 2, temperature=0.0, ignore_eos=True)
    engine.open(rows, PROMPT, STEPS + 2)
    engine.admit([Request([5 + row] * PROMPT, sampling, key=row) for row in range(rows)])
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter(), time.thread_time()
        engine.step()
        seconds.append((1e3 * (time.perf_counter() - began[0]), 1e3 * (time.thread_time() - began[1])))
    engine.close()
    return seconds


if __name__ == "__main__":
    main()
