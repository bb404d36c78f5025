"""What a training step costs at each speed, beside what its arithmetic says: skipped layers must cost nothing.

    .venv/bin/python tests/benchmarks/training_step.py
    .venv/bin/python tests/benchmarks/training_step.py --checkpoint DIR --pairs 16 --prompt 200 --shared 160 \\
        --response 35 --distillation

The checkpoint, by default the demo's, on random pairs; forward, backward and optimizer, the speeds in turn, medians.
Peak memory is of the process until then.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from actors.engine.decoder import Decoder
from actors.engine.library import packed_attention
from actors.engine.library.forcing import micro_batches, predicting_states, response_labels
from actors.engine.model.loading import inspect
from pipeline.config.tune import LossConfig
from pipeline.learn.tune.objective import Targets, summed_loss
from pipeline.learn.tune.trainer import KEY, Teacher

ROOT = Path(__file__).parents[2]
SPEEDS = (1.0, 2.0, 3.0, 4.0, 5.0)


def random_pairs(pairs: int, prompt: int, shared: int, response: int, vocabulary: int) -> list[dict[str, Any]]:
    """Pairs whose lengths lie within a tenth of those given, as length-grouped batches have them."""
    rng = random.Random(0)
    beginning = rng.choices(range(4, vocabulary), k=shared)
    rows = []
    for number in range(pairs):
        lengths = [rng.randint(length * 9 // 10, length) for length in (prompt - shared, response)]
        ids = beginning + rng.choices(range(4, vocabulary), k=sum(lengths))
        rows.append({"input_ids": ids, "prompt_tokens": shared + lengths[0], KEY: number})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default=str(ROOT / "configs/demo/checkpoint"))
    parser.add_argument("--pairs", type=int, default=48, help="a step")
    parser.add_argument("--prompt", type=int, default=30, help="tokens")
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--response", type=int, default=28, help="tokens")
    parser.add_argument("--tokens", type=int, default=700, help="of a micro-batch")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS)
    parser.add_argument("--together", type=int, default=1, help="times that a step draws the speed")
    parser.add_argument("--distillation", action="store_true", help="from the model itself, instead of cross-entropy")
    parser.add_argument("--without-prompt-gradient", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="also where the device has bfloat16 instructions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = inspect(asked.checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(asked.checkpoint, dtype=torch.float32)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    loss = LossConfig(references=0.0, distillation=1.0) if asked.distillation else LossConfig()
    rows = random_pairs(asked.pairs, asked.prompt, asked.shared, asked.response, model.config.vocab_size)
    bf16 = not asked.fp32 and (device.type == "cuda" or torch.cpu._is_avx512_bf16_supported())
    schedules = {
        speed: found.schedule({"speedup": speed, "horizon": asked.response, "keep_order": "paper"})
        for speed in asked.speeds
    }

    model.config._attn_implementation = packed_attention.register()
    decoder = Decoder(model)
    teacher = Teacher(decoder, loss, decoder.vocab_size) if asked.distillation else None

    def step(speed: float) -> None:
        drawn = [schedules[speed]] * asked.together
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            for batch in micro_batches(rows, asked.together, asked.tokens):
                labels = response_labels(batch).to(device).repeat(asked.together)
                targets = Targets.joined([teacher.targets(batch)] * asked.together) if teacher else None
                states = predicting_states(decoder, batch, drawn, prompt_gradient=not asked.without_prompt_gradient)
                total = summed_loss(decoder, states.flatten(0, 1), labels, targets, loss, 0.0)
                (total / asked.together / asked.pairs).backward()
        optimizer.step()
        optimizer.zero_grad()

    table = Table(box=None, pad_edge=False, title=f"{asked.pairs} pairs of {asked.prompt} + {asked.response} tokens")
    for name in ("nominal", "ms a step", "of 1x", "CPU ms", "GFLOP a step", "of 1x", "peak GB"):
        table.add_column(name, justify="right")
    step(asked.speeds[0])  # the teacher's distributions
    flops = {speed: _flops(lambda speed=speed: step(speed)) for speed in asked.speeds}
    times: dict[float, list[tuple[float, float]]] = {speed: [] for speed in asked.speeds}
    for _ in range(asked.rounds):
        for speed in asked.speeds:
            began = time.perf_counter(), time.process_time()
            step(speed)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[speed].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    first = asked.speeds[0]
    medians = {
        speed: [statistics.median(values) for values in zip(*pairs, strict=True)] for speed, pairs in times.items()
    }
    for speed in asked.speeds:
        seconds, processor = medians[speed]
        table.add_row(
            f"{speed:g}x",
            f"{1000 * seconds:.0f}",
            f"{seconds / medians[first][0]:.2f}",
            f"{1000 * processor:.0f}",
            f"{flops[speed] / 1e9:.0f}",
            f"{flops[speed] / flops[first]:.2f}",
            f"{peak:.1f}",
        )
    Console(soft_wrap=True).print(table)


def _flops(run: Callable[[], None]) -> int:
    counter = FlopCounterMode(display=False)
    # counters of single modules hook into backward passes; the inner ones of the loss in chunks do not allow that
    whole = SimpleNamespace(parents={"Global"}, __enter__=lambda: None, __exit__=lambda *args: None)
    counter.mod_tracker = cast(Any, whole)
    with counter:
        run()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
