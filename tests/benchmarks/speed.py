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
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from contestants import Ours, PeerEnded, Timing, start_peers  # noqa: E402
from ideal import Ceilings, Shape, least, measure  # noqa: E402
from shapes import SHAPES, write  # noqa: E402
from workloads import CONTEXT, KINDS, Workload, available, make  # noqa: E402

from actors.engine.loop import SCHEDULERS  # noqa: E402

INSTALLED = ROOT / "work" / "peers"
PEERS: dict[str, tuple[str, Path, dict[str, str]]] = {  # script, Python, environment
    "vllm": ("peer_vllm.py", INSTALLED / "vllm/bin/python", {}),
}


def rounds(contestants: dict[str, Callable[[], Timing]], runs: int) -> dict[str, list[Timing]]:
    """Every contestant once a round, in turn; the first round's timing, kept first, is a warm-up."""
    seen: dict[str, list[Timing]] = {name: [] for name in contestants}
    for _ in range(runs + 1):
        for name, contestant in list(contestants.items()):
            try:
                timing = contestant()
            except PeerEnded as error:
                print(f"{name} did not answer, passed by: {error}", file=sys.stderr)
                del contestants[name], seen[name]
                continue
            print(f"    {name:22s} {timing.tokens / timing.seconds:9,.0f} tokens/s", file=sys.stderr, flush=True)
            seen[name].append(timing)
    return seen


def median(timings: list[Timing]) -> Timing:
    """The one of the middle by its seconds."""
    return sorted(timings, key=lambda one: one.seconds)[(len(timings) - 1) // 2]


def figures(
    seen: dict[str, list[Timing]], workload: Workload, shape: Shape, ceilings: Ceilings, max_rows: int
) -> dict[str, dict[str, Any]]:
    """What is told of each contestant."""
    found: dict[str, dict[str, Any]] = {}
    rows = [(len(ids), new) for ids, new in zip(workload.prompts, workload.new, strict=True)]
    prompt_tokens = sum(len(ids) for ids in workload.prompts)
    for name, (warm_up, *timings) in seen.items():
        one = median(timings)
        found[name] = {
            "tokens_per_second": one.tokens / one.seconds,
            "seconds": [timing.seconds for timing in timings],
            "warm_up_seconds": warm_up.seconds,
            "peak_memory_bytes": max(timing.peak_bytes for timing in timings),
        }
        if one.stats is None or one.schedule is None or one.prefill is None or one.decode is None:
            continue
        full = median(seen[f"engine 1x {name.split()[-1]}"][1:])
        assert full.schedule is not None and full.decode is not None
        work, full_work = (
            least(rows, timing.schedule, shape, ceilings, torch.bfloat16.itemsize, max_rows) for timing in (one, full)
        )
        found[name] |= {
            "prefill_tokens_per_second": prompt_tokens / one.prefill,
            "decode_tokens_per_second": one.stats.decode_steps / one.decode,
            "layer_ratio": one.stats.full_layer_steps / one.stats.layer_steps,
            "speedup": full.seconds / one.seconds,
            "ideal_speedup": full_work.whole / work.whole,
            "decode_speedup": full.decode / one.decode,
            "decode_ideal_speedup": full_work.decode / work.decode,
            "of_ceiling": work.whole / one.seconds,
            "prefill_of_ceiling": work.prefill / one.prefill,
            "decode_of_ceiling": work.decode / one.decode,
            "work": vars(work),
            "cache_bytes": one.stats.cache_bytes,
            "padding": 1 - one.stats.prompt_tokens / one.stats.padded_prompt_tokens,
        }
        found[name]["of_ideal"] = found[name]["speedup"] / found[name]["ideal_speedup"]
        found[name]["decode_of_ideal"] = found[name]["decode_speedup"] / found[name]["decode_ideal_speedup"]
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """For people."""
    lines = [
        f"  {'':24s}{'tokens/s':>9s}{'warm-up':>10s}{'peak MiB':>9s}{'prefill/s':>11s}{'decode/s':>10s}{'layers':>8s}"
        f"{'speed-up':>9s}{'ideal':>7s}{'of it':>7s}{'decode':>8s}{'ideal':>7s}{'of it':>7s}{'of ceiling':>11s}"
        f"{'cache MiB':>10s}"
    ]
    for name, one in found.items():
        line = f"  {name:24s}{one['tokens_per_second']:9,.0f}{one['warm_up_seconds']:8.1f} s"
        line += f"{one['peak_memory_bytes'] / 2**20:9,.0f}"
        if "speedup" in one:
            line += (
                f"{one['prefill_tokens_per_second']:11,.0f}{one['decode_tokens_per_second']:10,.0f}"
                f"{one['layer_ratio']:7.2f}x{one['speedup']:8.2f}x{one['ideal_speedup']:6.2f}x{one['of_ideal']:7.2f}"
                f"{one['decode_speedup']:7.2f}x{one['decode_ideal_speedup']:6.2f}x{one['decode_of_ideal']:7.2f}"
                f"{one['of_ceiling']:11.2f}{one['cache_bytes'] / 2**20:10.0f}"
            )
        lines.append(line)
    return "\n".join(lines)


def compare(
    shape: str,
    options: argparse.Namespace,
    ceilings: Ceilings,
    folder: Path,
    results: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """One shape over all workloads; fills in `results` and saves them after each."""
    checkpoint = folder / shape
    config = write(shape, checkpoint)
    ours = Ours(checkpoint, options.max_rows)
    chosen = {name: PEERS[name] for name in options.peers}
    others = start_peers(chosen, checkpoint, options.threads, options.max_rows)
    results["model_bytes"] = ours.model_bytes
    results["peers"] = {
        name: {"version": other.version, "start_seconds": other.start_seconds} for name, other in others.items()
    }
    try:
        for kind in options.workloads:
            if not available(kind):
                print(f"{kind}: its data set is not there, passed by", file=sys.stderr)
                continue
            context = min(CONTEXT, config.max_position_embeddings)
            workload = make(kind, options.rows, config.vocab_size, context)
            contestants: dict[str, Callable[[], Timing]] = {
                f"engine {speed:g}x {scheduler}": partial(ours.answer, workload, speed, scheduler)
                for scheduler in options.schedulers
                for speed in options.speeds
            }
            contestants |= {name: partial(other.answer, workload) for name, other in others.items()}
            prompt_tokens = sum(len(ids) for ids in workload.prompts)
            title = f"{shape}, {kind}: {options.rows} rows, {prompt_tokens} prompt and {workload.generated} new tokens"
            print(title, file=sys.stderr, flush=True)
            found = figures(rounds(contestants, options.runs), workload, Shape.of(config), ceilings, options.max_rows)
            print(f"{title}\n{table(found)}\n", flush=True)
            results["workloads"][kind] = found
            save()
    finally:
        for other in others.values():
            other.close()


def processor() -> str:
    """Its name."""
    known = Path("/proc/cpuinfo")
    for line in known.read_text().splitlines() if known.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--shapes", default=["demo", "opt-125m"], **listed)
    parser.add_argument("--workloads", default=["prompt-heavy", "e2e"], **listed)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-rows", type=int, default=32, help="in flight at once")
    parser.add_argument("--speeds", default=[1.0, 2.0, 3.0, 5.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--schedulers", default=["lock_step"], **listed)
    parser.add_argument("--peers", default=["vllm"], **listed)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    options.peers = [name for name in options.peers if name]
    if 1.0 not in options.speeds:
        parser.error("--speeds: 1 must be among them, for the others are told beside it")
    known_names = {"shapes": SHAPES, "workloads": KINDS, "peers": PEERS, "schedulers": SCHEDULERS}
    for name, known in known_names.items():
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    ceilings = measure(torch.bfloat16)
    facts = {
        "machine": processor(),
        "threads": options.threads,
        "rows": options.rows,
        "max_rows": options.max_rows,
        "runs": options.runs,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compile": "off",  # of peers see their versions
        "command": shlex.join(["python", "tests/benchmarks/speed.py", *sys.argv[1:]]),
        "flops_per_second": ceilings.flops,
        "bytes_per_second": ceilings.bandwidth,
    }
    print(f"ceilings: {ceilings.flops / 1e9:,.0f} GFLOP/s, {ceilings.bandwidth / 1e9:,.0f} GB/s; {facts}\n", flush=True)
    results: dict[str, Any] = {"facts": facts, "shapes": {}}

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    for shape in options.shapes:
        results["shapes"][shape] = {"workloads": {}}
        with tempfile.TemporaryDirectory(prefix="speed-") as folder:
            compare(shape, options, ceilings, Path(folder), results["shapes"][shape], save)
        gc.collect()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
