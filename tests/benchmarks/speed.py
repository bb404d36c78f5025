"""How fast the engine is at 1x ... 5x, against what the machine allows and against what else a user could pick.

    .venv/bin/python tests/benchmarks/speed.py [--shapes demo,opt-125m] [--workloads prompt-heavy,e2e] [--rows 32]
        [--max-rows 32] [--speeds 1,2,3,5] [--peers vllm] [--runs 3] [--threads 2] [--schedulers lock_step] [--out FILE]

Random weights at real shapes, bfloat16, greedy; every contestant answers the same prompts of random tokens with the
same numbers of new tokens, in rounds taken in turn after one that only warms up; medians. A row's length is known
beforehand to vLLM, which has no other way to be told; the engine knows the median of a workload (its horizon) and the
longest. A peer in a Python of its own (`make peers`) is passed by, with a line, where it is not installed or fails.
Peak memory: most bytes resident during an answer, the whole process counted. The machine's ceilings are measured first.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import contestants
import torch
from ideal import Ceilings, Shape, least, measure
from shapes import SHAPES, write
from workloads import CONTEXT, KINDS, Workload, available, make

from actors.engine.loop import SCHEDULERS


def figures_of_all(
    seen: dict[str, list[contestants.Timing]], workload: Workload, shape: Shape, ceilings: Ceilings, max_rows: int
) -> dict[str, dict[str, float]]:
    """Return the figures of each contestant. For this engine, they include its work and its speed-ups."""
    found = {name: contestants.figures(timings) for name, timings in seen.items()}
    rows = [(len(ids), new) for ids, new in zip(workload.prompts, workload.new, strict=True)]
    for name, timings in seen.items():
        one = contestants.median(timings)
        if one.stats is None:
            continue
        full = contestants.median(seen[f"engine 1x {name.split()[-1]}"])
        work, full_work = (
            least(rows, timing.schedule, shape, ceilings, torch.bfloat16.itemsize, max_rows) for timing in (one, full)
        )
        speedup, ideal = full.seconds / one.seconds, full_work.whole / work.whole
        decode, decode_ideal = full.stats.decode_seconds / one.stats.decode_seconds, full_work.decode / work.decode
        found[name] |= {
            "prefill/s": sum(prompt for prompt, _ in rows) / one.stats.prefill_seconds,
            "decode/s": one.stats.decode_steps / one.stats.decode_seconds,
            "layer ratio": one.stats.full_layer_steps / one.stats.layer_steps,
            "speed-up": speedup,
            "ideal": ideal,
            "of ideal": speedup / ideal,
            "decode": decode,
            "decode ideal": decode_ideal,
            "decode of it": decode / decode_ideal,
            "of ceiling": work.whole / one.seconds,
            "cache MiB": one.stats.cache_bytes / 2**20,
        }
    return found


def compare(
    shape: str, options: argparse.Namespace, ceilings: Ceilings, checkpoint: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One shape: each workload with its figures, and the peers' versions."""
    config = write(shape, checkpoint)
    ours = contestants.Ours(checkpoint, options.max_rows)
    with contestants.running_peers(contestants.PEERS, checkpoint, options) as peers:
        for kind in options.workloads:
            if not available(kind):
                print(f"{kind}: its data set is not there (tests/benchmarks/fetch_data.py), passed by", file=sys.stderr)
                continue
            context = min(CONTEXT, config.max_position_embeddings)
            workload = make(kind, options.rows, config.vocab_size, context)
            runners = {
                f"engine {speed:g}x {scheduler}": partial(ours.answer, workload, speed, scheduler)
                for scheduler in options.schedulers
                for speed in options.speeds
            }
            prompt_tokens = sum(len(ids) for ids in workload.prompts)
            title = f"{shape}, {kind}: {options.rows} rows, {prompt_tokens} prompt and {workload.generated} new tokens"
            print(title, file=sys.stderr, flush=True)
            seen = contestants.rounds(runners, peers, workload, options.runs)
            found = figures_of_all(seen, workload, Shape.of(config), ceilings, options.max_rows)
            print(f"{title}\n{contestants.table(found)}\n", flush=True)
            yield kind, {"peers": {name: peer.version for name, peer in peers.items()}, "lines": found}


def main() -> None:
    """Measure and print."""
    parser = contestants.comparison(__doc__, 32, 32, contestants.PEERS)
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--shapes", default=["demo", "opt-125m"], **listed)
    parser.add_argument("--workloads", default=["prompt-heavy", "e2e"], **listed)
    parser.add_argument("--speeds", default=[1.0, 2.0, 3.0, 5.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--schedulers", default=["lock_step"], **listed)
    options = parser.parse_args()
    if 1.0 not in options.speeds:
        parser.error("--speeds: 1 must be among them, for the others are told beside it")
    known_names = {"shapes": SHAPES, "workloads": KINDS, "peers": contestants.PEERS, "schedulers": SCHEDULERS}
    for name, known in known_names.items():
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    torch.set_num_threads(options.threads)
    ceilings = measure(torch.bfloat16)
    results: dict[str, Any] = {"facts": contestants.facts(options, ceilings), "shapes": {}}
    print(f"ceilings: {ceilings.flops / 1e9:,.0f} GFLOP/s, {ceilings.bandwidth / 1e9:,.0f} GB/s; {results['facts']}\n")
    for shape in options.shapes:
        workloads = results["shapes"][shape] = {}
        with tempfile.TemporaryDirectory(prefix="speed-") as folder:
            for kind, found in compare(shape, options, ceilings, Path(folder, shape)):
                workloads[kind] = found
                contestants.save(results, options.out)
        gc.collect()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
