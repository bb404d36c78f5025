"""What to train for speed, at equal time: speed adapters of several ranks, one for all speeds or one each, all weights.

    .venv/bin/python tests/benchmarks/adapter_variants.py CHECKPOINT --minutes 20 [--variants rank-8,rank-8+shared,full]

A variant is rank-N, full, or bottleneck-N (see `skip_bottleneck`), and any of: +each, one adapter a speed; +shared, all
speeds at every step, which share the prompts' pass (`speeds_per_step`); +answers, no gradient through prompts
(`prompt_gradient: false`).

The rows are the checkpoint's own greedy answers at full depth to E2E's facts (`--prompts`), in a chat where it has a
template; or the pairs of an adaptation (`--pairs`, its folder). Every variant trains by `tune` for the same minutes of
all processors, known from its first steps, or for --steps; one adapter a speed divides either among the speeds. Other
work on the machine changes processor time less than the clock. Printed, and written to FOLDER/variants.json after every
variant: token KL, nats, at each speed on held-out rows, rows trained on, seconds on the clock and of the processor,
bytes of the files, and what bottlenecks cost at each speed. A variant that is already there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from skip_bottleneck import cost, load_bottlenecks, schedule_of, train_bottlenecks

from actors.engine.decoder import Decoder
from actors.engine.library.divergence import Model, teacher_forced
from actors.engine.model.loading import inspect, load_decoder, with_adapter
from actors.engine.model.speed_adapter import merge
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator
from pipeline.config.tune import TuneConfig
from pipeline.learn.tune.run import tune

PROBE_STEPS = 3
ADAPTER_RATE, FULL_RATE = 1e-3, 2e-4
ASK = "Write one or two sentences about a restaurant from these facts: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/e2e/train.parquet"))
    parser.add_argument("--pairs", type=Path, help="folder of `skipdecode adapt`")
    parser.add_argument("--folder", type=Path, default=Path("work/variants"))
    parser.add_argument("--variants", default="rank-8,rank-32,rank-128,rank-32+each,full")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, each variant")
    parser.add_argument("--steps", type=int, help="of each variant, in place of --minutes")
    parser.add_argument("--speedups", default="1.5,2,3")
    parser.add_argument("--rows", type=int, default=1000, help="answered at full depth")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument(
        "--keep-order",
        type=lambda text: json.loads(text) if text.startswith("[") else text,
        default="measured",
        help="as in a tune file",
    )
    parser.add_argument("--horizon", type=int, default=None)
    parser.add_argument("--prompt", choices=["full", "first"], default="full")
    parser.add_argument("--micro-batch-tokens", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    asked.folder.mkdir(parents=True, exist_ok=True)
    _answer(asked)
    path = asked.folder / "variants.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    speedups = [float(speedup) for speedup in asked.speedups.split(",")]
    for variant in asked.variants.split(","):
        if variant not in results:
            results[variant] = _run(asked, variant, speedups)
            path.write_text(json.dumps(results, indent=2))
        _print(variant, results[variant])


def _answer(asked: argparse.Namespace) -> None:
    """train.parquet and held-out.parquet in the folder: prompts and the checkpoint's own answers, as token ids."""
    if (asked.folder / "train.parquet").exists():
        return
    if asked.pairs is not None:
        for name in ("train", "held-out"):
            pq.write_table(pq.read_table(asked.pairs / f"{name}.parquet"), asked.folder / f"{name}.parquet")
        return
    facts = list(dict.fromkeys(pq.read_table(asked.prompts, columns=["prompt"])["prompt"].to_pylist()))
    chosen = np.random.default_rng(0).permutation(len(facts))[: asked.rows]
    generator = Generator(
        str(asked.checkpoint),
        schedule={"speedup": 1.0},
        sampling={"max_new_tokens": asked.new_tokens},
        dtype="float32" if not torch.cuda.is_available() else "bfloat16",
        max_batch=32,
    )

    def ask(fact: str) -> Any:
        has_chat = generator.tokenizer.chat_template is not None
        return [{"role": "user", "content": ASK + fact}] if has_chat else fact

    rows = []
    for first in range(0, len(chosen), 64):
        prompts = [generator.builder.prompt(ask(facts[row])) for row in chosen[first : first + 64]]
        for prompt, answer in zip(prompts, generator.answer(prompts), strict=True):
            tokens, ended = list(answer.token_ids or ()), answer.finish_reason == "stop"
            response = tokens[:-1] if ended else tokens
            if response:
                rows.append({"prompt": list(prompt.ids), "response": response, "ended": ended})
        print(f"answered {len(rows)} of {len(chosen)} rows", flush=True)
    for name, part in (("held-out", rows[: asked.held_out]), ("train", rows[asked.held_out :])):
        pq.write_table(pa.Table.from_pylist(part), asked.folder / f"{name}.parquet")


def _run(asked: argparse.Namespace, variant: str, speedups: Sequence[float]) -> dict[str, Any]:
    """Train one variant and measure it."""
    groups = [[speedup] for speedup in speedups] if "each" in variant.split("+") else [list(speedups)]
    kl: dict[str, float] = {}
    costs: dict[str, Any] = {}
    seconds = processor = steps = size = 0.0
    for number, group in enumerate(groups):
        name = f"{variant}-{number}"
        if asked.steps is None:
            probe = _trained(asked, f"{name}-probe", variant, group, PROBE_STEPS)
            wanted = 60 * asked.minutes / len(groups)
            each = probe["step_processor_seconds"] / PROBE_STEPS / torch.get_num_threads()
            count = max(1, math.floor(wanted / each))
        else:
            count = asked.steps // len(groups)
        began = time.process_time()
        record = _trained(asked, name, variant, group, count)
        processor += time.process_time() - began
        seconds, steps = seconds + record["step_seconds"], steps + count
        output = asked.folder / name
        size += sum(path.stat().st_size for path in output.glob("*.safetensors"))
        kl |= _distances(asked, output, variant, group)
        if variant.startswith("bottleneck-"):
            costs |= _costs(asked, output, group)
    rows = steps * asked.batch
    result = {"kl": kl, "seconds": seconds, "processor_seconds": processor, "rows": rows, "bytes": int(size)}
    return {**result, "costs": costs} if costs else result


def _trained(
    asked: argparse.Namespace, name: str, variant: str, speedups: Sequence[float], steps: int
) -> dict[str, Any]:
    """The record of a training, which is not repeated if it is finished."""
    what, *options = variant.split("+")
    kind, _, number = what.partition("-")
    rank = int(number) if kind == "rank" else None
    columns = {"prompt": "prompt", "train_reference": "response", "dev_reference": "response", "ended": "ended"}
    values: dict[str, Any] = {
        "model": {"path": str(asked.checkpoint)},
        "data": {
            "train": str(asked.folder / "train.parquet"),
            "dev": str(asked.folder / "held-out.parquet"),
            "max_tokens": 2048,
            "dev_rows": 2,  # scored below
            **columns,
        },
        "output": str(asked.folder / name),
        "schedule": {
            "speedups": speedups,
            "keep_order": asked.keep_order,
            "horizon": asked.horizon,
            "prompt": asked.prompt,
        },
        "loss": {"references": 0.0, "distillation": 1.0},
        "adapter": None if rank is None else {"rank": rank},
        "training": {
            "max_steps": steps,
            "batch_size": asked.batch,
            "speeds_per_step": len(speedups) if "shared" in options else 1,
            "prompt_gradient": "answers" not in options,
            "micro_batch_tokens": asked.micro_batch_tokens,
            "learning_rate": FULL_RATE if kind == "full" else ADAPTER_RATE,
            "warmup_steps": max(1, steps // 10),
            "bf16": True,  # where the device has instructions for it
            "eval_steps": 10**6,
            "save_steps": 10**6,
            "threads": asked.threads,
        },
    }
    config = TuneConfig.model_validate(values)
    if kind == "bottleneck":
        return train_bottlenecks(config, int(number))
    output = tune(config)
    record: dict[str, Any] = json.loads((output / "tune.json").read_text())
    return record


def _distances(asked: argparse.Namespace, output: Path, variant: str, speedups: Sequence[float]) -> dict[str, float]:
    """Token KL from the checkpoint at full depth, nats, on the held-out rows at each speed."""
    dtype, device = torch.float32, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_decoder(asked.checkpoint, dtype, device)
    fast: Decoder
    if variant.startswith("bottleneck-"):
        fast = load_bottlenecks(asked.checkpoint, output, dtype, device)
    elif variant.split("+")[0] == "full":
        fast = load_decoder(output, dtype, device)
    else:
        fast = load_decoder(asked.checkpoint, dtype, device)
        adapter = with_adapter(inspect(asked.checkpoint), output).adapter
        assert adapter is not None
        merge(fast.model, adapter)
    pairs = [(row["prompt"], row["response"]) for row in _held_out(asked)]
    lines = [Model(fast, schedule_of(output, base.num_layers, speedup)) for speedup in speedups]
    scores = teacher_forced(Model(base, ScheduleSpec().build(base.num_layers)), lines, pairs)
    return {
        f"{speedup:g}x": float(score.kl.sum() / score.tokens.sum())
        for speedup, score in zip(speedups, scores, strict=True)
    }


def _costs(asked: argparse.Namespace, output: Path, speedups: Sequence[float]) -> dict[str, dict[str, float]]:
    """What a folder's bottlenecks cost at each speed, over the held-out rows."""
    decoder = load_bottlenecks(asked.checkpoint, output, torch.bfloat16, torch.device("cpu"))
    tokens = round(statistics.mean(len(row["response"]) + row["ended"] for row in _held_out(asked)))
    schedules = {f"{speedup:g}x": schedule_of(output, decoder.num_layers, speedup) for speedup in speedups}
    return {speed: asdict(cost(decoder, schedule, tokens)) for speed, schedule in schedules.items()}


def _held_out(asked: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(asked.folder / "held-out.parquet").to_pylist()
    return rows[: asked.held_out]


def _print(variant: str, result: dict[str, Any]) -> None:
    kl = "  ".join(f"{speed} {value:.3f}" for speed, value in result["kl"].items())
    print(
        f"{variant:14} token KL {kl}  | {result['seconds']:.0f} s, "
        f"{result['processor_seconds']:.0f} s of the processor, {result['rows']:.0f} rows, "
        f"{result['bytes'] / 2**20:.1f} MiB",
        flush=True,
    )
    for speed, one in result.get("costs", {}).items():
        print(
            f"  at {speed} a token's bottlenecks cost {one['share']:.2f} layers: {one['mflop']:.2f} MFLOP and "
            f"{one['mib']:.2f} MiB of weights; {one['parameters']:,} parameters",
            flush=True,
        )


if __name__ == "__main__":
    main()
