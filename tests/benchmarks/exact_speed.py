"""Exact mode against full depth: tokens per second at several numbers of rows in flight, the same answers.

    .venv/bin/python tests/benchmarks/exact_speed.py [--speeds 3,5,8] [--rows 1,2,4,8,32] [--runs 3]
    .venv/bin/python tests/benchmarks/exact_speed.py --checkpoint work/real/model \\
        --speed-adapter configs/real/speed-adapter --pairs work/real/text/adapt/held-out.parquet

By default the demo checkpoint and demo prompts; --pairs: a Parquet file with a column `prompt` of token ids, as
`skipdecode adapt` leaves it. bf16, two threads, refill; contestants run in turn after one warm-up round, medians are
shown. A speed is that of the layers that draft. The last line is one JSON object.
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

from actors.answers import Answer, Prompt
from actors.engine.exact import ExactEngine, draft_layers
from actors.generator import Generator
from pipeline.demo_data import write_prompts

CHECKPOINT = "configs/demo/checkpoint"
ROUNDS = 4  # of rows: so many times the rows in flight are answered, and at least LEAST
LEAST = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--speed-adapter")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--speeds", default="3,5,8", help="nominal, of drafts")
    parser.add_argument("--horizon", type=int, help="default the checkpoint's")
    parser.add_argument("--rows", default="1,2,4,8,32", help="in flight")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    options: dict[str, Any] = {
        "sampling": {"max_new_tokens": given.tokens, "temperature": given.temperature},
        "dtype": given.dtype,
        "threads": given.threads,
        "scheduler": "refill",
        "cumulative_logprob": False,
        "schedule": {"speedup": 1.0},
    }
    generators = {"1x": Generator(given.checkpoint, **options)}
    for speed in map(float, given.speeds.split(",")):
        drafts = {"speedup": speed} | ({} if given.horizon is None else {"horizon": given.horizon})
        generators[f"{speed:g}x"] = Generator(
            given.checkpoint, speed_adapter=given.speed_adapter, drafts=drafts, **options
        )
    prompts = _prompts(generators["1x"], given.pairs, max(map(int, given.rows.split(","))) * ROUNDS)
    found: dict[str, Any] = {}
    print("rows  drafts  layers  tokens/s  of 1x  accepted  tokens a step of a row  answers as at 1x")
    for rows in map(int, given.rows.split(",")):
        some = prompts[: max(LEAST, rows * ROUNDS)]
        found[str(rows)] = _measure(generators, some, rows, given.runs)
        for name, line in found[str(rows)].items():
            shown = f"{rows:4}  {name:>6}  {line['layers']:6}  {line['tokens_per_second']:8,.0f}  {line['of_1x']:5.2f}"
            if name != "1x":
                shown += f"  {line['accepted']:8.2f}  {line['tokens_a_step']:22.2f}  {line['same']:16.3f}"
            print(shown, flush=True)
    print(json.dumps(found))


def _prompts(generator: Generator, pairs: Path | None, count: int) -> list[Prompt]:
    if pairs is not None:
        ids = pq.read_table(pairs, columns=["prompt"])["prompt"].to_pylist()[:count]
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_prompts(Path(folder), count, 1, seed=1)
            ids = generator.tokenizer(pq.read_table(folder)["prompt"].to_pylist())["input_ids"]
    return [Prompt(one, "bench", row) for row, one in enumerate(ids)]


def _measure(generators: dict[str, Generator], prompts: list[Prompt], rows: int, runs: int) -> dict[str, Any]:
    """Decode's tokens per second of each, and what was drafted for it."""
    rates: dict[str, list[float]] = {name: [] for name in generators}
    answers: dict[str, list[Answer]] = {}
    stats: dict[str, Any] = {}
    for run in range(runs + 1):
        for name, one in generators.items():
            one.max_batch = rows
            one.take_stats()
            began = time.perf_counter()
            answers[name] = one.answer(prompts)
            seconds = time.perf_counter() - began
            stats[name] = one.take_stats()
            if run:
                rates[name].append(stats[name].decode_steps / (seconds - stats[name].prefill_seconds))
    lines: dict[str, Any] = {}
    for name, one in generators.items():
        is_exact = isinstance(one.engine, ExactEngine)
        line = {
            "layers": len(draft_layers(one.engine.drafts)) if is_exact else one.schedule.num_layers,
            "tokens_per_second": statistics.median(rates[name]),
            "of_1x": statistics.median(rates[name]) / statistics.median(rates["1x"]),
        }
        if is_exact:
            one_stats = stats[name]
            rounds = one_stats.verified_tokens - one_stats.drafted_tokens  # of rows
            in_rounds = rounds + one_stats.accepted_tokens
            same = sum(a.token_ids == b.token_ids for a, b in zip(answers[name], answers["1x"], strict=True))
            line["accepted"] = one_stats.accepted_tokens / max(1, one_stats.drafted_tokens)
            line["tokens_a_step"] = one_stats.decode_steps / max(1, one_stats.decode_steps - in_rounds + rounds)
            line["same"] = same / len(prompts)
        lines[name] = line
    return lines


if __name__ == "__main__":
    main()
