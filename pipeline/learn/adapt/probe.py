"""`skipdecode adapt --probe`: estimates in minutes, without training, how much time an adaptation could save a job.

rows of the input ──> timed answers at full depth ──> layer order (keep order) ──> divergence with fewer layers
                                 └──> time at each speed, cost of the adaptation, number of rows for which it pays
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.library.divergence import Model, teacher_forced
from actors.engine.schedule.schedule import MEASURED, Schedule
from actors.generator import Generator
from pipeline.checkpoints.resolve import fetch
from pipeline.config.job import JobConfig
from pipeline.generate.settings import generator_settings
from pipeline.learn.adapt.choice import BreakEven, RowCost, stage_seconds, working_actors
from pipeline.learn.adapt.configs import Task
from pipeline.learn.adapt.plan import plan_adaptation
from pipeline.learn.adapt.rows import draw, prompt_ids, read_sample
from pipeline.learn.keep_order import ROWS, Row, batches, measured_order
from pipeline.messages import counted, duration
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.runtime.announce import announce

SHARES, SPEEDS = (0.9, 0.75, 0.5), (1.5, 2.0, 3.0)  # shares of the layers and speed-ups that are probed
HEAD_CALLS = 20  # timed calls of the vocabulary head


def probe(config: JobConfig, source: str) -> dict[str, Any]:
    """Estimate, from some rows answered at full depth, how much time an adaptation saves.

    Return values for `print_probe`; `seconds` are an actor's mean seconds for a row. Only the layer order is written,
    into the cache. source: name of the job file. Raises UserError for a mistake, or if no row can be answered.
    """
    task, _ = plan_adaptation(config, source)
    generator, prompts = _load(task), _prompts(task)
    announce(f"answering {len(prompts)} rows at full depth with {config.model.path}")
    generator.answer(prompts[:1])  # warms the engine up
    generator.take_stats()
    answers, stats = generator.answer(prompts), generator.take_stats()
    pairs = [(prompts[one.row].ids, one.token_ids) for one in answers if one.token_ids]
    if not pairs:
        raise UserError(f"no sampled row can be answered: {answers[0].error}")
    sums = (sum(len(ids) for ids, _ in pairs), stats.generated_tokens, stats.prefill_seconds, stats.decode_seconds)
    row = RowCost(*(total / len(pairs) for total in sums))
    head = _head_seconds(generator, min(len(pairs), generator.max_batch)) * row.answer
    shape = {"horizon": max(2, round(statistics.median(len(ids) for _, ids in pairs))), **task.shape}
    decoder = generator.engine.decoder
    if shape["keep_order"] == MEASURED:
        identity = {**task.resolved.identity(), "dtype": config.model.dtype}
        given = config.schedule.warmup
        order, warmup = measured_order(identity, lambda: decoder, pairs, given, config.model.cache)
        shape |= {"keep_order": order, "warmup": warmup}
    cost = sum(seconds for stage, seconds in stage_seconds(task, row)[1].items() if stage != "before")
    speeds = [_speed(task, row, min(head, row.decode_seconds), shape, speed, cost) for speed in SPEEDS]
    order = task.resolved.checkpoint.schedule({**shape, "speedup": 2.0}).keep_order
    return {
        "rows": task.rows,
        "probed": len(pairs),
        "tokens": {"prompt": row.prompt, "answer": row.answer},
        "seconds": {"prompt": row.prefill_seconds, "decode": row.decode_seconds, "head": head},
        "kept_layers": _divergence(generator, pairs, order),
        "adaptation_seconds": cost,
        "speeds": speeds,
        "worth_it": any(one["saved"] > 0 for one in speeds),
    }


def _load(task: Task) -> Generator:
    config, actors = task.config, task.config.actors
    sampling = config.sampling.model_copy(update={"temperature": 0.0, "n": 1, "logprobs": None})
    return Generator(
        str(fetch(task.resolved.source)),
        schedule={"speedup": 1.0},
        unadapted=True,
        **generator_settings(config.model, sampling, config.choices) | {"vllm": None},
        threads=actors.threads,
        cache_bytes=actors.cache_bytes or 2**30,
        max_batch=config.rows_in_flight,
    )


def _prompts(task: Task) -> list[Prompt]:
    table, _ = read_sample(task.config, task.files, task.schema, draw(task.rows, ROWS))
    found = prompt_ids(table, prompt_spec(task.config, task.resolved, 0.0))
    prompts = [Prompt(ids, "sample", row) for row, ids in enumerate(ids for ids in found if ids is not None)]
    if not prompts:
        raise UserError("no sampled row has a prompt that can be prepared; `skipdecode try` shows why")
    return prompts


@torch.inference_mode()
def _head_seconds(generator: Generator, rows: int) -> float:
    """Return the seconds per token that final norm and vocabulary head need, measured with `rows` tokens at once."""
    decoder = generator.engine.decoder
    hidden = torch.randn(rows, decoder.model.config.hidden_size).to(decoder.device, decoder.dtype)
    head = getattr(decoder, "likeliest", decoder.logits)  # the CPU decoder finds the likeliest token without all logits
    head(hidden)
    seconds = []
    for _ in range(HEAD_CALLS):
        began = time.perf_counter()
        head(hidden)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / rows  # not the mean, which would include calls that other processes delayed


def _divergence(generator: Generator, pairs: Sequence[Row], order: tuple[int, ...]) -> list[dict[str, float]]:
    """Run only the first n layers of `order`, for several n. Compare their next-token probabilities to full depth's."""
    decoder, layers = generator.engine.decoder, len(order)
    rows = [row for batch in batches(pairs, decoder.vocab_size) for row in batch]
    kept = [max(1, round(share * layers)) for share in SHARES]
    lines = [Model(decoder, Schedule(layers, (count,), order, warmup=0)) for count in kept]
    scores = teacher_forced(Model(decoder, generator.schedule), lines, rows, first=1)
    shares = [(each.sum() / score.tokens.sum() for each in (score.kl, score.agreed)) for score in scores]
    return [
        {"layers": count, "of": layers, "token_kl": float(nats), "agreed": float(agreed)}
        for count, (nats, agreed) in zip(kept, shares, strict=True)
    ]


def _speed(
    task: Task, row: RowCost, head: float, shape: Mapping[str, Any], speed: float, cost: float
) -> dict[str, Any]:
    """Estimate the wall-clock speed-up, and the number of rows from which adaptation pays.

    head: seconds of the vocabulary head for a row, which are the same at every speed. cost: seconds of the adaptation.
    """
    schedule = task.resolved.checkpoint.schedule({**shape, "speedup": speed})
    kept = (schedule.mean_depth(round(row.answer)) or schedule.num_layers) / schedule.num_layers
    policies = task.prompt_policies(row.prefill_seconds / row.seconds)
    prompt = schedule.depths[0] / schedule.num_layers if "first" in policies else 1.0
    answers = task.config.sampling.n  # answers for each row; the probe decodes only one
    fast = row.prefill_seconds * prompt + answers * (head + (row.decode_seconds - head) * kept)
    full = row.prefill_seconds + answers * row.decode_seconds
    account = BreakEven(cost, full, fast, task.rows, working_actors(task.config))
    return {"speedup": speed, "clock": full / fast, "at_rows": account.at_rows, "saved": account.saved}


def print_probe(console: Console, found: Mapping[str, Any]) -> None:
    """Print the values `found` by `probe` as a table and sentences."""
    seconds, tokens = found["seconds"], found["tokens"]
    total = seconds["prompt"] + seconds["decode"]
    console.print(
        f"{counted(found['probed'], 'row')} at full depth, on average: {tokens['prompt']:,.0f} prompt tokens, "
        f"{tokens['answer']:,.0f} answer tokens, {duration(total)}. Time: prompts {seconds['prompt'] / total:.0%}, "
        f"decode layers {max(seconds['decode'] - seconds['head'], 0) / total:.0%}, head {seconds['head'] / total:.0%}"
    )
    for kept in found["kept_layers"]:
        console.print(
            f"{kept['layers']} of {kept['of']} layers, without adaptation: KL from full depth {kept['token_kl']:.3f} "
            f"nats per token, {kept['agreed']:.0%} of the tokens as at full depth"
        )
    table = Table(box=None, pad_edge=False)
    for name in ("speed", "maximum speed-up", "pays from rows", "saves for this job"):
        table.add_column(name, justify="right")
    for one in found["speeds"]:
        pays = "never" if one["at_rows"] is None else f"{one['at_rows']:,}"
        saved = duration(one["saved"]) if one["saved"] > 0 else "nothing"
        table.add_row(f"{one['speedup']:g}x", f"{one['clock']:.2f}x", pays, saved)
    console.print(table)
    cost = duration(found["adaptation_seconds"])
    best = max(found["speeds"], key=lambda one: one["saved"])
    verdict = f"worth it if the loss is small: {best['speedup']:g}x would save {duration(max(best['saved'], 0))}"
    console.print(
        f"adaptation takes about {cost} here, and this job has {found['rows']:,} rows, so it is "
        f"{verdict if found['worth_it'] else 'not worth it'}"
    )
