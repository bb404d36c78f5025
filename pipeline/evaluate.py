"""`skipdecode evaluate`: quality against speed over a Parquet with references, on the engine alone, without Ray.

Speed is three numbers, never one: nominal, layer ratio over the decode steps really run, and wall clock against
the same engine at full depth, over the same rows in the same batches, whole and for decode alone.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import sacrebleu
from rich.console import Console
from rich.table import Table

from actors.generator import Generator, Prompt
from pipeline.checkpoints import fetch, locate
from pipeline.config_tuning import EvalConfig
from pipeline.tables import read_columns

CACHE_BYTES = 2**30


@dataclass(frozen=True)
class Speed:
    """One line of the table; wall clocks are against nominal 1. seconds: medians over the runs."""

    nominal: float
    layer_ratio: float
    mean_depth: float
    seconds: float
    decode_seconds: float
    tokens_per_second: float
    wall_clock: float
    decode_wall_clock: float
    bleu: float
    exact_match: float
    cache_bytes: int


def evaluate(config: EvalConfig) -> list[Speed]:
    """Answer the rows at every speed, score and time them, write `table.json` and the answers.

    BLEU is sacrebleu's, 13a, lower-cased, over all references. Raises ValueError of one line for bad input.
    """
    prompts, references = _read(config)
    folder = str(fetch(locate(config.model, config.storage).source))
    generators = {
        speedup: Generator(
            folder,
            schedule={**config.schedule.changes(), "speedup": speedup},
            sampling=config.sampling.model_dump(exclude={"seed"}),
            seed=config.sampling.seed,
            dtype=config.model.dtype,
            device=config.model.device,
            compile=config.model.compile,
            threads=config.threads,
            cache_bytes=CACHE_BYTES,
            max_batch=config.max_batch,
        )
        for speedup in dict.fromkeys([1.0, *config.speedups])
    }
    return _measure(config, generators, prompts, references)


def _measure(
    config: EvalConfig,
    generators: dict[float, Generator],
    prompts: Sequence[str],
    references: Sequence[Sequence[str]],
) -> list[Speed]:
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    times: dict[float, list[tuple[float, float]]] = {speedup: [] for speedup in generators}
    found: dict[float, tuple[list[str], float, float, int, int]] = {}
    for run in range(config.runs + (config.runs > 1)):  # in turn, so that a machine that drifts drifts for all
        for speedup, generator in generators.items():
            ids = generator.tokenizer(list(prompts))["input_ids"]
            rows = [Prompt(tokens, config.data.path[0], row) for row, tokens in enumerate(ids)]
            began = time.perf_counter()
            answers = generator.answer(rows)
            seconds = time.perf_counter() - began
            stats = generator.take_stats()
            if run or config.runs == 1:  # the first of several rounds only warms up
                times[speedup].append((seconds, stats.decode_seconds))
            bad = next((one for one in answers if one.error is not None), None)
            if bad is not None:
                raise ValueError(f"{config.data.path[0]}: row {bad.row}: {bad.error}")
            steps = max(stats.decode_steps, 1)
            texts = [one.generated_text or "" for one in answers]
            found[speedup] = (
                texts,
                stats.full_layer_steps / max(stats.layer_steps, 1),
                stats.layer_steps / steps,
                stats.generated_tokens,
                stats.cache_bytes,
            )
    whole = {speedup: statistics.median(one[0] for one in each) for speedup, each in times.items()}
    decode = {speedup: statistics.median(one[1] for one in each) for speedup, each in times.items()}
    speeds = []
    for speedup, (texts, ratio, depth, tokens, cache) in found.items():
        speeds.append(
            Speed(
                nominal=speedup,
                layer_ratio=ratio,
                mean_depth=depth,
                seconds=whole[speedup],
                decode_seconds=decode[speedup],
                tokens_per_second=tokens / whole[speedup],
                wall_clock=whole[1.0] / whole[speedup],
                decode_wall_clock=decode[1.0] / decode[speedup] if decode[speedup] else 1.0,
                bleu=bleu(texts, references),
                exact_match=exact_match(texts, references),
                cache_bytes=cache,
            )
        )
        table = pa.table({"prompt": list(prompts), "answer": texts, "references": [list(one) for one in references]})
        pq.write_table(table, output / f"answers-{speedup:g}x.parquet")
    (output / "table.json").write_text(json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n")
    return speeds


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU with all references of each row: sacrebleu, 13a, lower-cased."""
    most = max(len(one) for one in references)
    streams = [[one[place] if place < len(one) else None for one in references] for place in range(most)]
    metric = sacrebleu.BLEU(lowercase=True, tokenize="13a")
    score: float = metric.corpus_score(list(texts), streams).score  # type: ignore[arg-type]
    return score


def exact_match(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of rows whose text is one of the references, case and outer space ignored."""
    hits = sum(
        text.strip().lower() in {one.strip().lower() for one in each}
        for text, each in zip(texts, references, strict=True)
    )
    return hits / len(texts)


def print_table(console: Console, speeds: Sequence[Speed]) -> None:
    """The table, for a terminal."""
    table = Table(box=None, pad_edge=False)
    columns = ("nominal", "layer ratio", "mean depth", "wall", "decode", "tokens/s", "cache MiB", "BLEU", "exact")
    for name in columns:
        table.add_column(name, justify="right")
    for speed in speeds:
        table.add_row(
            f"{speed.nominal:g}x",
            f"{speed.layer_ratio:.2f}x",
            f"{speed.mean_depth:.2f}",
            f"{speed.wall_clock:.2f}x",
            f"{speed.decode_wall_clock:.2f}x",
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.cache_bytes / 2**20:.1f}",
            f"{speed.bleu:.1f}",
            f"{100 * speed.exact_match:.1f}%",
        )
    console.print(table)


def _read(config: EvalConfig) -> tuple[list[str], list[list[str]]]:
    prompts: list[str] = []
    references: list[list[str]] = []
    for path in config.data.path:
        texts, given = read_columns(path, (config.data.prompt, config.data.references))
        prompts += texts
        references += [one if isinstance(one, list) else [one] for one in given]
    prompts, references = prompts[: config.data.limit], references[: config.data.limit]
    for row, (prompt, each) in enumerate(zip(prompts, references, strict=True)):
        if (
            not isinstance(prompt, str)
            or not prompt.strip()
            or not each
            or not all(isinstance(one, str) for one in each)
        ):
            raise ValueError(f"{config.data.path[0]}: row {row} needs a prompt and at least one reference, both text")
    if not prompts:
        raise ValueError(f"{config.data.path[0]}: no rows")
    return prompts, references
