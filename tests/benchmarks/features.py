"""What each feature costs: milliseconds a generated token, and a row, beside the plain greedy run.

    .venv/bin/python tests/benchmarks/features.py [--rows 128] [--batch 64] [--threads 2] [--runs 3]
    .venv/bin/python tests/benchmarks/features.py --checkpoint work/real/model --speed 1 --rows 64
    .venv/bin/python tests/benchmarks/features.py --shape opt-125m --speed 1 --rows 64

With --shape: random weights of that shape, with the tokenizer of --checkpoint. By default the demo checkpoint at 3x.
Demo prompts, bf16, bare engine; contestants run in turn after one warm-up round, medians are shown. Every row draws
exactly 32 tokens (ignore_eos), so that all contestants do the same work; choices, which end by themselves, are shown by
rows per second alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import shapes
import torch

from actors.answers import Prompt
from actors.engine.model.loading import load_tokenizer
from actors.generator import Generator
from pipeline.demo_data import write_prompts

CHECKPOINT = "configs/demo/checkpoint"
TOKENS = 32
FIXED: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, min-p 0.05": {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    "three penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "stop string that never comes": {"stop": ["\u2603\u2603\u2603"]},
    "stop token ids, min new tokens": {"stop_token_ids": [5], "min_new_tokens": TOKENS},
    "logprobs 5": {"logprobs": 5},
}
LABELS = [f"The place is {kind} {food}" for kind in ("a pub with", "a cheap", "an expensive") for food in "ABCDEFGH"]
INSTRUCTION = "Write one sentence about the place, with its name, its food and where it lies. " * 6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--speed", type=float, default=3.0, help="nominal")
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), help="default the checkpoint's own weights")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="features-") as folder:
        if given.shape is not None:
            shapes.write(given.shape, Path(folder))
            load_tokenizer(given.checkpoint).save_pretrained(folder)
            given.checkpoint = folder
        measure(given)


def measure(given: argparse.Namespace) -> None:
    """Time all features on a checkpoint, print a table."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompts(Path(folder), given.rows, 1, seed=1)
        texts = pq.read_table(folder)["prompt"].to_pylist()
    generator = Generator(
        given.checkpoint,
        schedule={"speedup": given.speed},
        sampling={"max_new_tokens": TOKENS, "logprobs": 0},
        max_batch=given.batch,
        threads=given.threads,
    )
    plain = Generator(
        given.checkpoint,
        schedule={"speedup": given.speed},
        sampling=FIXED,
        max_batch=given.batch,
        threads=given.threads,
    )

    def prompts(texts: list[str], **changes: Any) -> list[Prompt]:
        ids = plain.tokenizer(texts)["input_ids"]
        return [Prompt(one, "bench", row, **changes) for row, one in enumerate(ids)]

    long = [INSTRUCTION + text for text in texts]
    instruction = plain.tokenizer(long)["input_ids"]
    common = next(place for place, tokens in enumerate(zip(*instruction, strict=False)) if len(set(tokens)) > 1)
    quarter = texts[: given.rows // 4]
    contestants: dict[str, tuple[Generator, list[Prompt], list[int]]] = {
        name: (generator if "logprobs" in values else plain, prompts(texts, sampling={**FIXED, **values}), [])
        for name, values in FEATURES.items()
    }
    hot = {**FIXED, "temperature": 1.0}
    contestants |= {
        "4 samples, prompt shared": (plain, prompts(quarter, sampling={**hot, "n": 4}), []),
        "4 samples, 4 prompts": (plain, prompts([f"{text} {k}" for text in quarter for k in "1234"], sampling=hot), []),
        f"{common} tokens before each prompt": (plain, prompts(long), []),
        f"{common} tokens, computed once": (plain, prompts(long), instruction[0][:common]),
        "choices (24 labels)": (
            generator,
            prompts(texts, sampling={"logprobs": 0}, choices=LABELS),
            [],
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    counts: dict[str, tuple[int, int]] = {}
    for run in range(given.runs + 1):
        for name, (one, rows, prefix) in contestants.items():
            began = time.perf_counter()
            answers = one.answer(rows, prefix)
            if run:
                seconds[name].append(time.perf_counter() - began)
            assert not any(answer.error for answer in answers)
            counts[name] = len(answers), sum(answer.generated_tokens for answer in answers)
    print(
        f"{given.rows} rows, {TOKENS} tokens each, batch {given.batch}, bf16, {given.speed:g}x, {given.threads} threads"
    )
    print(f"torch {torch.__version__}; medians of {given.runs} rounds in turn")
    found: dict[str, dict[str, float]] = {}
    base = statistics.median(seconds["greedy"])
    for name, times in seconds.items():
        answers_, tokens = counts[name]
        middle = statistics.median(times)
        found[name] = {"seconds": middle, "rows_per_second": answers_ / middle, "tokens_per_second": tokens / middle}
        found[name]["against_greedy"] = middle / base
        print(
            f"{name:36s} {answers_ / middle:7,.1f} rows/s {tokens / middle:7,.0f} tokens/s  "
            f"{middle / base:5.2f} of greedy's time  (spread {min(times):.2f} to {max(times):.2f} s)"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
