"""What a training step costs at each speed, beside what its arithmetic says: skipped layers must cost nothing.

    .venv/bin/python tests/benchmarks/training_step.py

The demo checkpoint on random pairs of E2E's lengths; forward, backward and optimizer, the speeds in turn, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from actors.engine.decoder import Decoder
from actors.engine.loading import inspect
from actors.engine.teacher_forcing import ResponseBatch, response_logits
from pipeline.config.tune import LossConfig
from pipeline.tune.trainer import summed_loss

ROOT = Path(__file__).parents[2]
SPEEDS = (1.0, 2.0, 3.0, 4.0, 5.0)


def batch_of(pairs: int, prompt: int, response: int, vocabulary: int, device: torch.device) -> ResponseBatch:
    """Pairs whose lengths lie within a tenth of those given, as length-grouped batches have them."""
    rng = random.Random(0)
    rows = []
    for _ in range(pairs):
        lengths = [rng.randint(length * 9 // 10, length) for length in (prompt, response)]
        rows.append({"input_ids": rng.choices(range(4, vocabulary), k=sum(lengths)), "prompt_tokens": lengths[0]})
    return ResponseBatch.of(rows, device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default=str(ROOT / "configs/demo/checkpoint"))
    parser.add_argument("--pairs", type=int, default=48, help="a step")
    parser.add_argument("--prompt", type=int, default=30, help="tokens")
    parser.add_argument("--response", type=int, default=28, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = inspect(asked.checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(
        asked.checkpoint, dtype=torch.float32, attn_implementation="sdpa" if device.type == "cuda" else "eager"
    )
    decoder = Decoder(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = batch_of(asked.pairs, asked.prompt, asked.response, decoder.vocab_size, device)

    def step(speed: float) -> None:
        schedule = found.schedule({"speedup": speed})
        with torch.autocast(device.type, torch.bfloat16):
            logits = response_logits(decoder, batch, schedule)
        total, count = summed_loss(logits, batch.labels, LossConfig(), 0.0, None)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    flops = {speed: _flops(lambda speed=speed: step(speed)) for speed in SPEEDS}
    times: dict[float, list[float]] = {speed: [] for speed in SPEEDS}
    for _ in range(asked.rounds):
        for speed in SPEEDS:
            began = time.perf_counter()
            step(speed)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[speed].append(time.perf_counter() - began)
    table = Table(box=None, pad_edge=False, title=f"{asked.pairs} pairs of {asked.prompt} + {asked.response} tokens")
    for name in ("nominal", "ms a step", "of 1x", "GFLOP a step", "of 1x"):
        table.add_column(name, justify="right")
    whole = statistics.median(times[1.0])
    for speed in SPEEDS:
        seconds = statistics.median(times[speed])
        table.add_row(
            f"{speed:g}x",
            f"{1000 * seconds:.0f}",
            f"{seconds / whole:.2f}",
            f"{flops[speed] / 1e9:.0f}",
            f"{flops[speed] / flops[1.0]:.2f}",
        )
    Console(soft_wrap=True).print(table)


def _flops(run: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


if __name__ == "__main__":
    main()
