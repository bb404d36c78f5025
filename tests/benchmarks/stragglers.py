"""What rows of unequal lengths cost, and what bucketing, compaction and an order by predicted length each give back.

    .venv/bin/python tests/benchmarks/stragglers.py [--shape opt-125m] [--workloads e2e,qmsum] [--rows 256]
        [--max-rows 32] [--speeds 1,3] [--runs 3] [--threads 2] [--out FILE]

Lengths as the data sets have them (`workloads.py`), which the engine meets only as rows end. Ways to run them, each
adding to the one before, but for the last three:

    arrival     batches of rows in the order given; ended rows ride along to the batch's end
    bucketing   batches of rows with prompts of like length: the scheduler's own
    compaction  ended rows give up their place at once: the engine's default
    predicted   with compaction; batches of rows with answers of like predicted length (`output_length.py`)
    oracle      the same by the true length: the most that any predictor could gain
    refill      the other scheduler: the next row takes an ended row's place

Time lost, as a share of the time that a hypothetical engine takes; of prefill and decode seconds. Two such engines:

    padding     no padding in prefill, no step of an ended row, no time for moving rows:
                prefill x (1 - padded share) + decode x (1 - idle share) - seconds of retiring rows
    full rows   besides, always so many rows in flight as may be, none of another length than its neighbours: a token
                at position p takes what it took in a batch of --max-rows rows, alike and all that long, run beside the
                others, divided by the rows; a prompt token what it took where it took least, padding taken out

The second is one time for all ways. Runs are taken in turn after a batch that only warms up; medians. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from contestants import CACHE_BYTES, Forced, load_model, requests_of  # noqa: E402
from output_length import explained, fit  # noqa: E402
from shapes import SHAPES, write  # noqa: E402
from workloads import CONTEXT, Workload, available, chance_of, draw, make  # noqa: E402

from actors.engine.decoder import Decoder  # noqa: E402
from actors.engine.engine import Engine  # noqa: E402
from actors.engine.loop import generate  # noqa: E402
from actors.engine.schedule.schedule import ScheduleSpec  # noqa: E402
from actors.engine.scheduler import plan_batches  # noqa: E402
from actors.engine.types import Completion, EngineStats, Request  # noqa: E402


class WatchedEngine(Engine):
    """Keeps the seconds of each step, and those of retiring rows: compaction and the making of completions."""

    step_seconds: list[float]
    retire_seconds: float

    def watch(self) -> None:
        """Begin anew."""
        self.step_seconds, self.retire_seconds = [], 0.0

    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        began = time.perf_counter()
        ended = super().step(last=last)
        self.step_seconds.append(time.perf_counter() - began)
        return ended

    def retire(self) -> list[tuple[int, Completion]]:
        began = time.perf_counter()
        ended = super().retire()
        if ended:
            self.retire_seconds += time.perf_counter() - began
        return ended


@dataclass
class Measured:
    """One run, or the medians of several: seconds of all, of prefill, of decode, of retiring rows, of each step."""

    seconds: float
    prefill: float
    decode: float
    retire: float
    steps: list[float]
    stats: EngineStats
    idle_row_steps: int  # decode steps of rows that had ended

    @property
    def unpadded_prefill(self) -> float:
        """Seconds of prefill that no padding took."""
        return self.prefill * self.stats.prompt_tokens / self.stats.padded_prompt_tokens

    @property
    def idle_share(self) -> float:
        """Of the rows of all steps."""
        return self.idle_row_steps / (self.idle_row_steps + self.stats.decode_steps)

    @property
    def without_padding(self) -> float:
        """Seconds of prefill and decode of the first hypothetical engine."""
        return self.unpadded_prefill + self.decode * (1 - self.idle_share) - self.retire


def medians(runs: Sequence[Measured]) -> Measured:
    """Of each kind of seconds; counts are the same in all runs."""
    middle = statistics.median
    return Measured(
        middle(one.seconds for one in runs),
        middle(one.prefill for one in runs),
        middle(one.decode for one in runs),
        middle(one.retire for one in runs),
        [middle(times) for times in zip(*(one.steps for one in runs), strict=True)],
        runs[0].stats,
        runs[0].idle_row_steps,
    )


@dataclass(frozen=True)
class Way:
    """order: of the rows, cut into batches; None: the scheduler cuts. compacts: whether ended rows leave."""

    order: Sequence[int] | None = None
    compacts: bool = True
    scheduler: str = "lock_step"


def by(length: Sequence[float]) -> list[int]:
    """Rows, the longest first."""
    return sorted(range(len(length)), key=lambda row: (-length[row], row))


def ways(workload: Workload, predicted: Sequence[float]) -> dict[str, Way]:
    """All there are to run a workload."""
    return {
        "arrival": Way(range(len(workload.new)), compacts=False),
        "bucketing": Way(None, compacts=False),
        "compaction": Way(),
        "predicted": Way(by(predicted)),
        "oracle": Way(by(workload.new)),
        "refill": Way(None, scheduler="refill"),
    }


def run(decoder: Decoder, workload: Workload, speedup: float, horizon: int, way: Way, max_rows: int) -> Measured:
    """All rows of a workload, once."""
    schedule = ScheduleSpec(speedup=speedup, horizon=horizon).build(decoder.num_layers)
    engine = WatchedEngine(decoder, schedule, (), cumulative_logprob=False)
    engine.watch()
    requests = requests_of(workload)
    if way.order is not None:
        requests = [requests[row] for row in way.order]
    size = len(requests) if way.order is None else max_rows
    idle = 0
    if not way.compacts:
        batches = [requests[first : first + size] for first in range(0, len(requests), size)]
        requests = [row for batch in batches for row in riding(engine, batch, max_rows)]
        idle = sum(row.ending.new for row in requests) - workload.generated  # type: ignore[union-attr]
    began = time.perf_counter()
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        generate(engine, batch, budget_bytes=CACHE_BYTES, max_rows=max_rows, scheduler=way.scheduler)
    seconds = time.perf_counter() - began
    stats = engine.take_stats()
    stats.generated_tokens -= idle
    stats.decode_steps -= idle
    assert stats.generated_tokens == workload.generated
    assert way.order is None or stats.batches == -(-len(requests) // size), "a batch did not fit the cache"
    return Measured(
        seconds, stats.prefill_seconds, stats.decode_seconds, engine.retire_seconds, engine.step_seconds, stats, idle
    )


def riding(engine: Engine, rows: Sequence[Request], max_rows: int) -> list[Request]:
    """The rows, each as long as the longest of its batch: an ended row that rides along takes the same time."""
    batches = plan_batches(
        [len(row.prompt_ids) for row in rows],
        [row.new_tokens_limit(engine.decoder.context_length) for row in rows],
        row_bytes=engine.row_bytes,
        budget_bytes=CACHE_BYTES,
        max_rows=max_rows,
    )
    longer = list(rows)
    for batch in batches:
        most = max(rows[row].ending.new for row in batch)  # type: ignore[union-attr]
        for row in batch:
            longer[row] = replace(rows[row], ending=Forced(most))
    return longer


def full_batch(workload: Workload, max_rows: int, vocabulary: int) -> Workload:
    """As many rows as may be in flight, all as long as the longest answer, prompts of the mean length: that of the
    prompts that a step reads, so that long answers count for more."""
    steps = sum(new - 1 for new in workload.new)
    prompt = round(sum(len(ids) * (new - 1) for ids, new in zip(workload.prompts, workload.new, strict=True)) / steps)
    chance = chance_of("full")
    prompts = [[chance.randrange(4, vocabulary) for _ in range(prompt)] for _ in range(max_rows)]
    return Workload("full", prompts, [workload.limit] * max_rows, workload.limit)


def first_rows(workload: Workload, rows: int) -> Workload:
    """The beginning of a workload."""
    return Workload(workload.name, workload.prompts[:rows], workload.new[:rows], workload.limit)


def figures(one: Measured, full_rows: float) -> dict[str, float]:
    """What is told of a way; full_rows: seconds of the second hypothetical engine."""
    stats = one.stats
    return {
        "seconds": one.seconds,
        "prefill_seconds": one.prefill,
        "decode_seconds": one.decode,
        "retire_seconds": one.retire,
        "padded_share": 1 - stats.prompt_tokens / stats.padded_prompt_tokens,
        "idle_row_steps": one.idle_row_steps,
        "idle_share": one.idle_share,
        "steps": len(one.steps),
        "mean_live_rows": stats.decode_steps / len(one.steps),
        "lost_to_padding": (one.prefill + one.decode) / one.without_padding - 1,
        "lost_to_full_rows": (one.prefill + one.decode) / full_rows - 1,
    }


def compare(decoder: Decoder, workload: Workload, speedup: float, options: argparse.Namespace) -> dict[str, Any]:
    """One workload at one speed, all ways."""
    horizon = workload.horizon
    most_prompt = max(len(ids) for ids in workload.prompts)
    texts = [prompt for prompt, _ in draw(workload.name, chance_of(workload.name), options.rows)]
    predicted = fit(workload.name, most_prompt).predict(texts)
    full = full_batch(workload, options.max_rows, decoder.vocab_size)
    tried = {name: (workload, way) for name, way in ways(workload, predicted).items()} | {"full": (full, Way())}
    run(decoder, first_rows(workload, options.max_rows), speedup, horizon, Way(), options.max_rows)
    seen: dict[str, list[Measured]] = {name: [] for name in tried}
    for _ in range(options.runs):
        for name, (given, way) in tried.items():
            seen[name].append(run(decoder, given, speedup, horizon, way, options.max_rows))
            print(f"    {name:12s}{seen[name][-1].seconds:8.2f} s", file=sys.stderr, flush=True)
    typical = {name: medians(runs) for name, runs in seen.items()}
    full_steps = typical.pop("full").steps
    decode = sum(seconds * sum(new - 1 > p for new in workload.new) for p, seconds in enumerate(full_steps))
    full_rows = decode / options.max_rows + min(one.unpadded_prefill for one in typical.values())
    return {
        "horizon": horizon,
        "predictor_r2": explained(predicted, workload.new),
        "full_rows_seconds": full_rows,
        "ways": {
            name: figures(one, full_rows) | {"all_seconds": [run.seconds for run in seen[name]]}
            for name, one in typical.items()
        },
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"  {'':12s}{'s':>8s}{'prefill':>9s}{'decode':>8s}{'retire':>8s}{'padded':>8s}{'idle':>7s}{'steps':>7s}"
        f"{'live rows':>10s}{'lost: padding':>14s}{'full rows':>10s}"
    ]
    for name, one in found["ways"].items():
        lines.append(
            f"  {name:12s}{one['seconds']:8.2f}{one['prefill_seconds']:9.2f}{one['decode_seconds']:8.2f}"
            f"{one['retire_seconds']:8.2f}{one['padded_share']:8.1%}{one['idle_share']:7.1%}{one['steps']:7d}"
            f"{one['mean_live_rows']:10.1f}{one['lost_to_padding']:14.1%}{one['lost_to_full_rows']:10.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-125m", choices=SHAPES)
    parser.add_argument("--workloads", default=["e2e", "qmsum"], type=lambda text: text.split(","))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=32, help="in flight at once")
    parser.add_argument("--speeds", default=[1.0, 3.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    for kind in options.workloads:
        if kind not in ("e2e", "qmsum") or not available(kind):
            parser.error(f"--workloads: {kind}: e2e and qmsum are known, if ../shared/data holds them")
    torch.set_num_threads(options.threads)
    facts = {"machine": platform.machine(), "threads": options.threads, "torch": torch.__version__, "compile": "off"}
    asked = {"shape": options.shape, "rows": options.rows, "max_rows": options.max_rows, "runs": options.runs}
    results: dict[str, Any] = {"facts": facts | asked, "workloads": {}}
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        config = write(options.shape, Path(folder))
        decoder = Decoder(load_model(Path(folder)))
    decoder.prepare_for_cpu()
    gc.freeze()  # as an actor of the pipeline does
    for kind in options.workloads:
        workload = make(kind, options.rows, config.vocab_size, min(CONTEXT, config.max_position_embeddings))
        results["workloads"][kind] = {}
        for speedup in options.speeds:
            title = f"{options.shape}, {kind}, {speedup:g}x: {options.rows} rows, {options.max_rows} at once"
            print(title, file=sys.stderr, flush=True)
            found = compare(decoder, workload, speedup, options)
            print(f"{title}; predictor's R² {found['predictor_r2']:.2f}\n{table(found)}\n", flush=True)
            results["workloads"][kind][f"{speedup:g}x"] = found
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
