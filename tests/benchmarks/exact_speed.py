"""Exact mode against full depth: tokens per second of decode at several numbers of rows in flight, the same answers.

    .venv/bin/python tests/benchmarks/exact_speed.py [--workload demo] [--speeds 3,5] [--rows 1,2,4,8,32] [--runs 3]
    .venv/bin/python tests/benchmarks/exact_speed.py --checkpoint work/real/model --workload rewrite --speeds ""
    .venv/bin/python tests/benchmarks/exact_speed.py --checkpoint work/real/model --workload long-tailed --whole

Workloads: demo: its prompts. rewrite: texts of E2E's references, to write again without mistakes. extract: passages of
QMSum's meetings, to quote from. long-tailed: E2E's facts; lengths of the answers lognormal around 48 tokens, which the
engine meets only as rows end. --pairs: a Parquet file with a column `prompt` of token ids, as `skipdecode adapt` leaves
it. Without the data sets: exit status 3.

Contestants: 1x; lookup: prompt lookup alone; of each speed, drafts of its layers and prompt lookup. bf16, refill;
contestants run in turn, in an order of each round, behind a round that warms them up. Shown are medians over the rounds
of each contestant's speed over 1x's in the same round, and an interval that holds the true median with a chance of 95%
(with six rounds or more): of wall clock, and of the processor's seconds, prompts included, which other work disturbs
less (give --threads 1: threads that wait for another spin). --fresh: each round makes its engines anew, and warms them
up: where their memory lies differs too. --whole: whole jobs in this process in place of rows in flight: read, answered
at most 32 together, committed. --passes: what a pass of all layers over several tokens of a row costs, alone: the
processor's milliseconds of one thread. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from workloads import DATA

from actors.answers import Answer, Prompt
from actors.engine.checkpoint.loading import load_tokenizer
from actors.engine.engine import Engine
from actors.engine.exact.draft_length import MOST_DRAFTS
from actors.engine.types import EngineStats, Request, SamplingParams
from actors.generator import Generator
from pipeline import job as jobs
from pipeline.backends.in_process import InProcess
from pipeline.config.job import JobConfig
from pipeline.demo_data import write_prompts

CHECKPOINT = "configs/demo/checkpoint"
ROUNDS = 4  # of rows: so many times the rows in flight are answered, and at least LEAST
LEAST = 24
TOGETHER = 32  # rows of a whole job
SHARDS = 4  # of it
MEDIAN, SIGMA = 48, 0.8  # tokens of long-tailed answers
PASSAGE = 2400  # characters of a meeting
PASSES, PROMPTS, TOKENS = 40, (20, 200), (1, 2, 4, 8)
NO_DATA = 3  # exit status
Made = tuple[str, dict[str, Any]]  # prompt, and the row's own sampling parameters


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--speed-adapter")
    parser.add_argument("--workload", default="demo", choices=["demo", *MAKERS])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--speeds", default="3,5", help="nominal, of the layers that draft; '' for lookup alone")
    parser.add_argument("--horizon", type=int, help="default the checkpoint's")
    parser.add_argument("--rows", default="1,2,4,8,32", help="in flight; with --whole the job's rows")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--passes", action="store_true")
    given = parser.parse_args()
    if given.passes:
        print(json.dumps(_passes(given)))
        return
    if given.workload != "demo" and not (DATA / SOURCES[given.workload]).is_dir():
        print(f"skipped: the data sets are not in {DATA}", file=sys.stderr)
        sys.exit(NO_DATA)
    drafts: dict[str, dict[str, Any] | None] = {"1x": None, "lookup": {"speedup": 1.0}}
    for speed in map(float, filter(None, given.speeds.split(","))):
        drafts[f"{speed:g}x"] = {"speedup": speed} | ({} if given.horizon is None else {"horizon": given.horizon})
    counts = list(map(int, given.rows.split(",")))
    print(
        "rows  drafts  tokens/s  of 1x (95%)          of 1x, processor     layers' accepted  looked up  "
        "tokens a step  answers as at 1x"
    )
    found: dict[str, Any] = {}
    if given.whole:
        for rows in counts:
            found[str(rows)] = _shown(rows, _whole_jobs(given, drafts, rows))
            if given.workload == "long-tailed":  # the only one whose lengths are known beforehand
                print(
                    _few_in_flight(
                        [own["max_new_tokens"] for _, own in long_tailed(random.Random("long-tailed"), rows)]
                    )
                )
    else:
        found = _engines(given, drafts, counts)
    print(json.dumps(found))


def _engines(given: argparse.Namespace, drafts: dict[str, dict[str, Any] | None], counts: list[int]) -> dict[str, Any]:
    """One engine of each contestant, which answers the same rows with different numbers of them in flight; with --fresh
    one of each round."""
    options: dict[str, Any] = {
        "sampling": {"max_new_tokens": given.tokens, "temperature": given.temperature},
        "dtype": given.dtype,
        "threads": given.threads,
        "scheduler": "refill",
        "cumulative_logprob": False,
        "schedule": {"speedup": 1.0},
    }

    def made(name: str) -> Generator:
        keys = drafts[name]
        return Generator(given.checkpoint, drafts=keys, speed_adapter=_adapter(given, keys), **options)

    generators = {} if given.fresh else {name: made(name) for name in drafts}
    prompts = _prompts(given, max(LEAST, max(counts) * ROUNDS))
    found = {}
    for rows in counts:
        some = prompts[: max(LEAST, rows * ROUNDS)]
        limited: dict[str, Generator] = {}

        def run(
            name: str, some: list[Prompt] = some, limited: dict[str, Generator] = limited, rows: int = rows
        ) -> tuple[list[Any], EngineStats, float]:
            if name not in limited:
                one = generators.get(name) or made(name)
                limited[name] = one.at(one.schedule, max_batch=rows)
                limited[name].answer(some)
            one = limited[name]
            one.take_stats()
            began = time.process_time()
            answers = [answer.token_ids for answer in one.answer(some)]
            return answers, one.take_stats(), time.process_time() - began

        between = limited.clear if given.fresh else lambda: None
        found[str(rows)] = _shown(rows, _in_turn(list(drafts), run, given.runs, between))
    return found


@torch.inference_mode()
def _passes(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Processor's milliseconds of a pass by prompt tokens and tokens of one row; the least of many, taken in turn."""
    torch.set_num_threads(1)
    engine = Generator(given.checkpoint, dtype=given.dtype, schedule={"speedup": 1.0}, cumulative_logprob=False).engine
    decoder, found = engine.decoder, {}
    assert isinstance(engine, Engine) and decoder.stack is not None, "no kernels of all layers here"
    for prompt in PROMPTS:
        engine.open(1, prompt, MOST_DRAFTS + 2)
        engine.admit([Request([5] * prompt, SamplingParams(max_new_tokens=2))])
        cache, best = engine.cache, dict.fromkeys(TOKENS, math.inf)
        assert cache is not None
        for _ in range(PASSES):
            for tokens in TOKENS:
                places = list(range(prompt, prompt + tokens))
                cache.begin_step(places, decoder.device, [0] * tokens)
                began = time.thread_time()
                decoder.steps(torch.full((tokens, 1), 5), torch.tensor(places)[:, None], cache)
                best[tokens] = min(best[tokens], 1e3 * (time.thread_time() - began))
        engine.close()
        found[str(prompt)] = {str(tokens): milliseconds for tokens, milliseconds in best.items()}
        print(f"prompt of {prompt}: " + ", ".join(f"{n} tokens {best[n] / best[1]:.2f}" for n in TOKENS), flush=True)
    return found


def _adapter(given: argparse.Namespace, keys: dict[str, Any] | None) -> str | None:
    """A speed adapter is of the layers that draft."""
    return None if keys is None or keys["speedup"] == 1 else given.speed_adapter


def _whole_jobs(given: argparse.Namespace, drafts: dict[str, dict[str, Any] | None], rows: int) -> dict[str, Any]:
    """Whole jobs of each contestant over the same rows."""
    with tempfile.TemporaryDirectory() as folder:
        table = [{"prompt": ids.ids, "sampling": dict(ids.sampling)} for ids in _prompts(given, rows)]
        text = load_tokenizer(given.checkpoint)
        for row in table:
            row["prompt"] = text.decode(row["prompt"])
        pq.write_table(pa.Table.from_pylist(table), f"{folder}/in.parquet")

        def run(name: str) -> tuple[list[Any], EngineStats, float]:
            keys = drafts[name]
            model = {"path": given.checkpoint, "dtype": given.dtype}
            adapter = _adapter(given, keys)
            config = JobConfig.model_validate(
                {
                    "input": {"path": f"{folder}/in.parquet", "sampling": "sampling"},
                    "output": {"path": f"{folder}/{name}-{time.time_ns()}", "token_ids": True},
                    "model": model if adapter is None else {**model, "speed_adapter": adapter},
                    "schedule": {"speedup": 1.0} if keys is None else {**keys, "exact": True},
                    "sampling": {"max_new_tokens": given.tokens, "temperature": given.temperature},
                    "actors": {"threads": given.threads, "scheduler": "refill", "max_batch": TOGETHER},
                    "shard_rows": max(1, rows // SHARDS),
                }
            )
            began = time.process_time()
            totals = jobs.run(config, backend=InProcess()).totals
            seconds = time.process_time() - began
            parts = sorted(Path(config.output.path).glob("part-*.parquet"))
            answers = [ids for part in parts for ids in pq.read_table(part)["token_ids"].to_pylist()]
            names = EngineStats.__dataclass_fields__
            stats = EngineStats(**{name: getattr(totals, name) for name in names if hasattr(totals, name)})
            return answers, stats, seconds

        return _in_turn(list(drafts), run, given.runs)


def _few_in_flight(lengths: Sequence[int]) -> str:
    """How many steps of a job at 1x have few rows in flight, where exact mode gains most; lengths of its answers.

    Shards of a job in one process do not overlap; those of an actor do, as one shard.
    """
    lines = []
    for kind, shards in (("one shard after another", SHARDS), ("shards that overlap", 1)):
        steps: Counter[int] = Counter()
        for first in range(0, len(lengths), size := max(1, len(lengths) // shards)):
            waiting, left = list(lengths[first : first + size])[::-1], list[int]()
            while waiting or left:
                while waiting and len(left) < TOGETHER:
                    left.append(waiting.pop())
                steps[len(left)] += 1
                left = [tokens - 1 for tokens in left if tokens > 1]
        few = ", ".join(f"{sum(steps[n] for n in range(most + 1))} at most {most}" for most in (1, 2, 4, 8))
        lines.append(f"{kind}: of {steps.total()} steps {few} rows in flight")
    return "\n".join(lines)


def _in_turn(
    names: list[str],
    run: Callable[[str], tuple[list[Any], EngineStats, float]],
    runs: int,
    between: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Medians of each contestant; run returns answers, counts and the processor's seconds. between: before each round;
    None: there is a first round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, list[Answer]] = {}
    stats: dict[str, EngineStats] = {}
    for number in range(0 if between is None else 1, runs + 1):
        if between is not None:
            between()
        for name in random.Random(number).sample(names, len(names)):
            answers[name], stats[name], seconds = run(name)
            if number:
                rates[name].append(stats[name].decode_steps / stats[name].decode_seconds)
                processor[name].append(1 / seconds)
    lines = {}
    for name, one in stats.items():
        rounds = one.verified_tokens - one.drafted_tokens + one.verified_lookup_tokens - one.looked_up_tokens  # of rows
        extra = one.accepted_tokens + one.accepted_lookup_tokens
        lines[name] = {
            "tokens_per_second": statistics.median(rates[name]),
            "of_1x": _of_1x(rates, name),
            "processor_of_1x": _of_1x(processor, name),
            "drafted": one.drafted_tokens,
            "accepted": one.accepted_tokens / max(1, one.drafted_tokens),
            "looked_up": one.looked_up_tokens,
            "accepted_lookups": one.accepted_lookup_tokens / max(1, one.looked_up_tokens),
            "rounds_of_rows": rounds,
            "tokens_a_step": one.decode_steps / max(1, one.decode_steps - extra),
            "same": sum(a == b for a, b in zip(answers[name], answers["1x"], strict=True)) / len(answers["1x"]),
        }
    return lines


def _of_1x(rates: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Median over the rounds of a contestant's rate over 1x's, and the interval of rounds that holds the true median
    with a chance of 95%: from the least to the most, where there are fewer than six."""
    ratios = sorted(own / base for own, base in zip(rates[name], rates["1x"], strict=True))
    outside, most = 0, len(ratios)
    while 2 * sum(math.comb(most, below) for below in range(outside + 2)) <= 0.05 * 2**most:
        outside += 1
    return statistics.median(ratios), ratios[outside], ratios[-1 - outside]


def _shown(rows: int, lines: dict[str, Any]) -> dict[str, Any]:
    for name, one in lines.items():
        layers = f"{one['accepted']:.2f} of {one['drafted']:,}"
        looked_up = f"{one['accepted_lookups']:.2f} of {one['looked_up']:,}"
        ratios = "  ".join("{:.2f} [{:.2f}, {:.2f}]".format(*one[kind]) for kind in ("of_1x", "processor_of_1x"))
        speed = f"{one['tokens_per_second']:8,.0f}  {ratios}"
        rest = f"{layers:>16}  {looked_up:>9}  {one['tokens_a_step']:13.2f}  {one['same']:16.3f}"
        print(f"{rows:4}  {name:>6}  {speed}  {rest}", flush=True)
    return lines


def _prompts(given: argparse.Namespace, count: int) -> list[Prompt]:
    """The workload's rows, the same in every run."""
    tokenizer = load_tokenizer(given.checkpoint)
    if given.pairs is not None:
        ids = pq.read_table(given.pairs, columns=["prompt"])["prompt"].to_pylist()[:count]
        return [Prompt(one, "bench", row) for row, one in enumerate(ids)]
    if given.workload == "demo":
        with tempfile.TemporaryDirectory() as folder:
            write_prompts(Path(folder), count, 1, seed=1)
            made: list[Made] = [(text, {}) for text in pq.read_table(folder)["prompt"].to_pylist()]
        ids = tokenizer([text for text, _ in made])["input_ids"]
    else:
        made = MAKERS[given.workload](random.Random(given.workload), count)
        texts = [text for text, _ in made]
        if tokenizer.chat_template is not None:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in chats]
        ids = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        for _, own in made:
            own["max_new_tokens"] = min(given.tokens, own.get("max_new_tokens", given.tokens))
    return [Prompt(one, "bench", row, sampling=own) for row, (one, (_, own)) in enumerate(zip(ids, made, strict=True))]


def _rows(name: str, chance: random.Random, count: int) -> list[dict[str, Any]]:
    table = pq.read_table(DATA / name / "test.parquet", columns=["prompt", "references"]).to_pylist()
    return chance.choices(table, k=count)


def rewrite(chance: random.Random, count: int) -> list[Made]:
    """Texts to write again."""
    rows = _rows("e2e", chance, count)
    asked = "Correct the spelling mistakes in this text. Answer with the whole text and nothing else.\n\n"
    return [(asked + " ".join(row["references"][:3]), {}) for row in rows]


def extract(chance: random.Random, count: int) -> list[Made]:
    """A meeting's passage, and a question whose answer is a quotation."""
    made: list[Made] = []
    for row in _rows("qmsum", chance, count):
        question, _, meeting = row["prompt"].partition("\n")
        passage = meeting[:PASSAGE].rsplit("\n", 1)[0]
        asked = f"Quote, word for word, what was said in this meeting that answers the question: {question}"
        made.append((f"{passage}\n\n{asked}", {}))
    return made


def long_tailed(chance: random.Random, count: int) -> list[Made]:
    """Facts to text, with lengths that have a long tail."""
    rows = _rows("e2e", chance, count)
    lengths = [min(512, max(2, round(MEDIAN * chance.lognormvariate(0, SIGMA)))) for _ in rows]
    asked = "Write about this restaurant, in full sentences: "
    return [
        (asked + row["prompt"], {"max_new_tokens": length, "ignore_eos": True})
        for row, length in zip(rows, lengths, strict=True)
    ]


MAKERS: dict[str, Callable[[random.Random, int], list[Made]]] = {
    "rewrite": rewrite,
    "extract": extract,
    "long-tailed": long_tailed,
}
SOURCES = {"rewrite": "e2e", "extract": "qmsum", "long-tailed": "e2e"}

if __name__ == "__main__":
    main()
