"""Prefill time of prompts with a shared beginning: computed for each prompt, and computed once.

    .venv/bin/python tests/benchmarks/prefix_speed.py [--shapes demo,opt-125m] [--rows 64] [--instruction 500] [--new 8]
        [--batch 64] [--speed 1] [--runs 3] [--threads 2]
    .venv/bin/python tests/benchmarks/prefix_speed.py --rows 5000 --instructions 50 --instruction 300 --shard 1000

With --instructions each row has one of so many, at random, and the scheduler finds them in each shard.

Random weights at real shapes, bfloat16, bare engine. Every prompt is an instruction of so many tokens and then a
question as long as one of Banking77's test split (words × 1.3; without the data set, lengths of 5 to 30 tokens); every
row gets the same few new tokens. Prefill seconds as the engine counts them, in turn after a round that only warms up,
medians. The instruction's own pass, once an actor, is told apart: it is not in the seconds of a round.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pyarrow.parquet as pq
import torch
from shapes import SHAPES, write
from transformers import AutoModelForCausalLM
from workloads import DATA, SEED, TOKENS_A_WORD

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

QUESTIONS = DATA / "banking77" / "test.parquet"
CONTEXT = 2048  # the demo's own is shorter than instruction and question; its positions are turned, not learned
CACHE_BYTES = 2**32


def question_tokens(rows: int) -> list[int]:
    """Lengths of the rows' own parts, the same at every call."""
    chance = random.Random(SEED)
    if not QUESTIONS.exists():
        return [chance.randint(5, 30) for _ in range(rows)]
    texts = pq.read_table(QUESTIONS, columns=["prompt"])["prompt"].to_pylist()
    return [max(1, round(TOKENS_A_WORD * len(text.split()))) for text in chance.choices(texts, k=rows)]


def decoder_of(shape: str) -> Decoder:
    """A model of the shape that has room for the prompts."""
    with tempfile.TemporaryDirectory(prefix="prefix-") as folder:
        config = write(shape, Path(folder))
        config.max_position_embeddings = max(config.max_position_embeddings, CONTEXT)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
    decoder = Decoder(model.eval().requires_grad_(False))
    decoder.prepare_for_cpu()
    return decoder


def compare(shape: str, given: argparse.Namespace) -> dict[str, float]:
    """Median prefill and decode seconds of a round with the prefix and without, and the prefix's own pass."""
    decoder = decoder_of(shape)
    chance = random.Random(SEED)
    instructions = [
        [chance.randrange(4, decoder.vocab_size) for _ in range(given.instruction)] for _ in range(given.instructions)
    ]
    instruction = instructions[0]
    sampling = SamplingParams(max_new_tokens=given.new, ignore_eos=True)
    requests = [
        Request(
            [*chance.choice(instructions), *(chance.randrange(4, decoder.vocab_size) for _ in range(length))],
            sampling,
            key=row,
        )
        for row, length in enumerate(question_tokens(given.rows))
    ]
    schedule = ScheduleSpec(speedup=given.speed, horizon=max(2, given.new)).build(decoder.num_layers)
    contestants = {
        "each time": (Engine(decoder, schedule, (), cumulative_logprob=False), False),
        "once": (Engine(decoder, schedule, (), cumulative_logprob=False), True),
    }
    shards = [requests[first : first + given.shard] for first in range(0, len(requests), given.shard)]
    seconds: dict[str, list[float]] = {f"{part} {name}": [] for name in contestants for part in ("prefill", "decode")}
    own_pass = []
    for number in range(given.runs + 1):
        for name, (engine, shares) in contestants.items():
            for shard in shards:
                prefix = instruction if shares and given.instructions == 1 else ()
                generate(
                    engine,
                    shard,
                    budget_bytes=CACHE_BYTES,
                    max_rows=given.batch,
                    prefix=prefix,
                    share_prefixes=shares,
                )
            stats = engine.take_stats()
            if number:
                seconds[f"prefill {name}"].append(stats.prefill_seconds)
                seconds[f"decode {name}"].append(stats.decode_seconds)
        if number:
            alone = Engine(decoder, schedule, (), cumulative_logprob=False)
            generate(alone, [Request(instruction, sampling)], budget_bytes=CACHE_BYTES, max_rows=1)
            own_pass.append(alone.take_stats().prefill_seconds)
    found = {name: statistics.median(times) for name, times in seconds.items()}
    found["prefix alone"] = statistics.median(own_pass)
    found["prefill speed-up"] = found["prefill each time"] / found["prefill once"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=["demo", "opt-125m"], type=lambda text: text.split(","))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--instruction", type=int, default=500, help="tokens")
    parser.add_argument("--instructions", type=int, default=1, help="different ones")
    parser.add_argument("--shard", type=int, default=1000, help="rows of a call of the scheduler")
    parser.add_argument("--new", type=int, default=8, help="tokens")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--speed", type=float, default=1.0, help="nominal")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if unknown := set(given.shapes) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(sorted(unknown))}: known are {', '.join(SHAPES)}")
    torch.set_num_threads(given.threads)
    lengths = question_tokens(given.rows)
    where = "Banking77" if QUESTIONS.exists() else "no data set: made-up lengths"
    print(
        f"{given.rows} rows, {given.instructions} instructions, {given.instruction} + {statistics.mean(lengths):.1f} "
        f"tokens ({where}), {given.new} new tokens, batch {given.batch}, {given.speed:g}x, bf16, {given.threads} "
        f"threads, torch {torch.__version__}, no torch.compile; medians of {given.runs} rounds in turn"
    )
    results = {}
    for shape in given.shapes:
        found = results[shape] = compare(shape, given)
        print(
            f"{shape:10s} prefill {found['prefill each time']:.2f} s each time, {found['prefill once']:.2f} s once: "
            f"{found['prefill speed-up']:.1f}x  (the instruction alone {found['prefix alone']:.3f} s, once an actor); "
            f"decode {found['decode each time']:.2f} s and {found['decode once']:.2f} s",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
