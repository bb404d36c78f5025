"""What the screened head and int8 weights gain in decode, beside bfloat16 with the whole head.

    .venv/bin/python tests/benchmarks/eight_bits.py [--models demo,smollm2,opt-125m] [--rows 8,64] [--runs 5]

Greedy, bf16, two threads, bare engine; lines run in turn after one warm-up round, medians are shown: tokens a second of
decode and of prompts, ms a step of the head. A screened head must give a whole one's tokens, or the program ends. For
int8: token KL from bfloat16 at the same speed, nats, over bfloat16's own answers. demo: its checkpoint; smollm2:
work/real/model (make real-model) on the chats of work/real/text (real_data.py text), with the speed adapter of
configs/real at 3x; opt-125m: its shape with random weights, of which a KL says nothing. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import shapes
import torch
from real_model import ADAPTER
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.library.divergence import Model, teacher_forced
from actors.engine.loop import generate
from actors.engine.model.loading import inspect, load_decoder, load_tokenizer, with_adapter
from actors.engine.model.speed_adapter import merge
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request, SamplingParams
from pipeline.demo_data import write_prompts

PLACES = {"demo": Path("configs/demo/checkpoint"), "smollm2": Path("work/real/model")}
CHATS = Path("work/real/text/test.parquet")
TOKENS = 32
LINES = ("whole head", "screened head", "int8 weights")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="demo,smollm2,opt-125m")
    parser.add_argument("--rows", default="8,64", help="in flight")
    parser.add_argument("--speeds", default="1,3", help="nominal")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.models.split(","):
            for speed in map(float, given.speeds.split(",")):
                found += _measured(name, speed, list(map(int, given.rows.split(","))), given.runs, Path(scratch))
    print(json.dumps(found))


def _measured(name: str, speed: float, counts: Sequence[int], runs: int, scratch: Path) -> list[dict[str, Any]]:
    folder = PLACES.get(name, scratch / name)
    if name not in PLACES and not folder.exists():
        shapes.write(name, folder)
    checkpoint = inspect(folder) if name in PLACES else None
    if name == "smollm2" and speed > 1:
        checkpoint = with_adapter(inspect(folder), ADAPTER)
    engines = {}
    for line in LINES:
        decoder = load_decoder(folder, torch.bfloat16, torch.device("cpu"))
        if checkpoint is not None and checkpoint.adapter is not None:
            merge(decoder.model, checkpoint.adapter)
        decoder.prepare_for_cpu(int8=line == "int8 weights")
        if line == "whole head":
            decoder._screened = None
        horizon = {} if checkpoint is not None and checkpoint.spec is not None else {"horizon": TOKENS}
        changes = {"speedup": speed, **horizon}
        if checkpoint is None:
            schedule = ScheduleSpec().overridden(changes).build(decoder.num_layers)
        else:
            schedule = checkpoint.schedule(changes)
        engines[line] = Engine(decoder, schedule, (), cumulative_logprob=False)
    lines = []
    for rows in counts:
        lines += _timed(name, speed, engines, prompts_of(name, folder, rows), runs)
    return lines


def prompts_of(name: str, folder: Path, rows: int) -> list[list[int]]:
    """Token ids of so many prompts of a model."""
    if name not in PLACES:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(10, 40_000, (rows, 48), generator=generator).tolist()
    if name == "smollm2":
        chats: list[list[int]] = pq.read_table(CHATS, columns=["prompt"])["prompt"].to_pylist()[:rows]
        return chats
    with tempfile.TemporaryDirectory() as place:
        write_prompts(Path(place), rows, 1, seed=1)
        ids: list[list[int]] = load_tokenizer(folder)(pq.read_table(place)["prompt"].to_pylist())["input_ids"]
    return ids


def _timed(
    name: str, speed: float, engines: dict[str, Engine], prompts: list[list[int]], runs: int
) -> list[dict[str, Any]]:
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    requests = [Request(ids, sampling, key=row) for row, ids in enumerate(prompts)]
    decode: dict[str, list[float]] = {line: [] for line in engines}
    prefill: dict[str, list[float]] = {line: [] for line in engines}
    heads: dict[str, list[float]] = {line: [] for line in engines}
    answers: dict[str, list[tuple[int, ...]]] = {}
    for run in range(runs + 1):
        for line, engine in engines.items():
            engine.take_stats()
            with _timed_heads(engine.decoder) as seconds:
                done = generate(engine, requests, budget_bytes=2**32, max_rows=len(requests))
            stats = engine.take_stats()
            answers[line] = [tuple(one.token_ids) for one in done]
            if run:
                decode[line].append(stats.decode_steps / stats.decode_seconds)
                prefill[line].append(stats.padded_prompt_tokens / stats.prefill_seconds)
                heads[line].append(statistics.median(seconds))
    assert answers["screened head"] == answers["whole head"], "the screened head has other tokens"
    base = {kind: statistics.median(rates["whole head"]) for kind, rates in (("d", decode), ("p", prefill))}
    lines = []
    for line, engine in engines.items():
        rates = statistics.median(decode[line]), statistics.median(prefill[line])
        found = {"model": name, "speed": speed, "rows": len(prompts), "line": line}
        found |= {"decode": rates[0], "gain": rates[0] / base["d"], "prefill_gain": rates[1] / base["p"]}
        found["head_ms"] = 1000 * statistics.median(heads[line])
        screen = engine.decoder.screen
        if screen is not None:
            found |= {"candidates": screen.candidates / screen.rows, "undecided": screen.undecided / screen.rows}
        if line == "int8 weights":
            found["kl"] = _divergence(engines["whole head"].decoder, engine.decoder, engine.schedule, prompts, answers)
        lines.append(found)
        more = {key: round(value, 5) for key, value in found.items() if key in ("candidates", "undecided", "kl")}
        shown = f"{name:9} {speed:g}x {len(prompts):3} rows  {line:14} {rates[0]:8,.0f} tokens/s  {found['gain']:.2f}"
        print(f"{shown}  prompts {found['prefill_gain']:.2f}  head {found['head_ms']:.2f} ms  {more or ''}", flush=True)
    return lines


@contextmanager
def _timed_heads(decoder: Decoder) -> Iterator[list[float]]:
    """Seconds of the head at each step: final norm, logits, and the likeliest tokens."""
    seconds: list[float] = []
    plain = decoder.likeliest

    def timed(hidden: Tensor) -> list[int]:
        began = time.perf_counter()
        tokens = plain(hidden)
        seconds.append(time.perf_counter() - began)
        return tokens

    decoder.likeliest = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del decoder.likeliest


def _divergence(
    full: Decoder,
    quantized: Decoder,
    schedule: Schedule,
    prompts: list[list[int]],
    answers: dict[str, list[tuple[int, ...]]],
) -> float:
    pairs = list(zip(prompts, answers["whole head"], strict=True))
    [scores] = teacher_forced(Model(full, schedule), [Model(quantized, schedule)], pairs)
    return float(scores.kl.sum() / scores.tokens.sum())


if __name__ == "__main__":
    main()
