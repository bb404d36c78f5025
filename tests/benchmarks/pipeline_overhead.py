"""Tokens per second of the engine at 1x ... 5x beside `transformers` generate, and what the pipeline costs on top.

    .venv/bin/python tests/benchmarks/throughput.py [--rows 512] [--pipeline-rows 2048] [--batch 64] [--threads 2]
        [--runs 3]

Demo checkpoint and demo prompts, greedy, bf16. Every contestant answers the same rows in batches of the same
size, longest prompts first, and stops a row at its end-of-sequence token; rounds are run in turn after one
that only warms up, medians are shown. Pipeline: the same rows as a job with one actor of one thread, from the
first shard's start to the last one's end, against the bare engine with one thread on the same shards. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM

from actors.generator import Generator, Prompt
from pipeline.demo import write_prompts

CHECKPOINT = "configs/demo/checkpoint"
NEW_TOKENS = 64
SPEEDUPS = (1, 2, 3, 5)


def engine(speedup: float, batch: int, threads: int) -> Generator:
    """The bare engine at one speed."""
    return Generator(
        CHECKPOINT,
        schedule={"speedup": float(speedup)},
        sampling={"max_new_tokens": NEW_TOKENS},
        max_batch=batch,
        threads=threads,
    )


def answer_with_engine(generator: Generator, prompts: list[str]) -> int:
    """Generated tokens."""
    ids = generator.tokenizer(prompts)["input_ids"]
    answers = generator.answer([Prompt(tokens, "bench", row) for row, tokens in enumerate(ids)])
    return sum(one.generated_tokens for one in answers)


def answer_with_generate(model: Any, tokenizer: Any, prompts: list[str], batch: int) -> int:
    """Generated tokens of the library's own loop, up to each row's end of sequence."""
    ids = sorted(tokenizer(prompts)["input_ids"], key=len, reverse=True)
    tokens = 0
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        padded = tokenizer.pad({"input_ids": part}, padding_side="left", return_tensors="pt")
        output = model.generate(**padded, max_new_tokens=NEW_TOKENS, do_sample=False)
        for row in output[:, padded["input_ids"].shape[1] :].tolist():
            tokens += row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
    return tokens


def rates(contestants: dict[str, Callable[[], int]], runs: int) -> dict[str, float]:
    """Median generated tokens per second of each, run in turn."""
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for run in range(runs + 1):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            tokens = contestant()
            if run:
                seen[name].append(tokens / (time.perf_counter() - began))
    return {name: statistics.median(each) for name, each in seen.items()}


def pipeline_overhead(prompts: Path, rows: int, batch: int, runs: int) -> dict[str, float]:
    """One actor of one thread in the pipeline against the bare engine with one thread, on the same four shards."""
    write_prompts(prompts, rows, 1, seed=2)
    bare = engine(3, batch, 1)
    texts = [text for path in sorted(prompts.glob("*.parquet")) for text in pq.read_table(path)["prompt"].to_pylist()]
    found: dict[str, list[float]] = {"bare": [], "pipeline": [], "outside_engine": []}
    answer_with_engine(bare, texts[:batch])
    for _ in range(runs):
        began, tokens = time.perf_counter(), 0
        for first in range(0, rows, rows // 4):
            tokens += answer_with_engine(bare, texts[first : first + rows // 4])
        seconds = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.yaml"
            job.write_text(
                yaml.safe_dump(
                    {
                        "input": {"path": str(prompts)},
                        "output": {"path": f"{folder}/out"},
                        "model": {"path": CHECKPOINT},
                        "schedule": {"speedup": 3},
                        "sampling": {"max_new_tokens": NEW_TOKENS},
                        "actors": {"count": 1, "threads": 1, "max_batch": batch},
                        "shard_rows": rows // 4,
                    }
                )
            )
            command = [sys.executable, "-m", "pipeline", "run", str(job)]
            subprocess.run(command, check=True, capture_output=True)
            stats = pq.read_table(f"{folder}/out/_job/stats.parquet").to_pylist()
        found["bare"].append(tokens / seconds)
        span = max(one["finished"] for one in stats) - min(one["started"] for one in stats)
        found["pipeline"].append(sum(one["generated_tokens"] for one in stats) / span)
        inside = sum(one["prefill_seconds"] + one["decode_seconds"] for one in stats)
        found["outside_engine"].append(1 - inside / span)
    medians = {name: statistics.median(each) for name, each in found.items()}
    return {**medians, "overhead": 1 - medians["pipeline"] / medians["bare"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--pipeline-rows", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder)
        write_prompts(prompts, given.rows, 1, seed=1)
        texts = pq.read_table(prompts)["prompt"].to_pylist()
        generators = {speedup: engine(speedup, given.batch, given.threads) for speedup in SPEEDUPS}
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16, local_files_only=True).eval()
        tokenizer = generators[1].tokenizer
        contestants: dict[str, Callable[[], int]] = {
            "transformers generate": lambda: answer_with_generate(model, tokenizer, texts, given.batch),
            **{
                f"engine {speedup}x": lambda one=generator: answer_with_engine(one, texts)  # type: ignore[misc]
                for speedup, generator in generators.items()
            },
        }
        speeds = rates(contestants, given.runs)
        ratios = {}
        for speedup, generator in generators.items():
            stats = generator.take_stats()
            ratios[f"engine {speedup}x"] = stats.full_layer_steps / stats.layer_steps
        overhead = pipeline_overhead(prompts / "pipeline", given.pipeline_rows, given.batch, given.runs)
    print(
        f"{platform.processor() or platform.machine()}, {given.threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {given.rows} rows, batch {given.batch}, bf16, no torch.compile"
    )
    for name, speed in speeds.items():
        against = f"{speed / speeds['engine 1x']:.2f}x of engine 1x"
        print(f"{name:24s} {speed:8,.0f} tokens/s  {against:20s}  layer ratio {ratios.get(name, 1):.2f}x")
    print(
        f"pipeline at 3x, one actor, one thread: {overhead['pipeline']:,.0f} tokens/s, bare engine "
        f"{overhead['bare']:,.0f}: overhead {100 * overhead['overhead']:.1f}%; of the actor's own time between first "
        f"start and last end {100 * overhead['outside_engine']:.1f}% is spent outside the engine"
    )
    print(json.dumps({"tokens_per_second": speeds, "layer_ratio": ratios, "pipeline": overhead}))


if __name__ == "__main__":
    main()
