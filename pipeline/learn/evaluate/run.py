"""`skipdecode evaluate`: measures quality and speed with the engine alone, without Ray.

    rows, checkpoints → lines → answers, timed in turn → statistics of rows → scores with intervals → tables

A line is one speed or model. Quality is measured against full depth and chance, and against references if there are
any. Speed is measured by the nominal speed-up, by the layer ratio of the decode steps, and by the times of the whole
run and of its decode steps. All are relative to full depth on the same engine, rows and batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import MEASURED, Schedule, ScheduleSpec
from actors.engine.types import EngineStats
from actors.generator import Generator
from pipeline.answer.answer_checks import warnings_of
from pipeline.config.evaluate import EvalConfig
from pipeline.learn.evaluate.inputs import CHANCE, REFERENCE, EvalInputs, EvalRow, Variant, prepare, speeds
from pipeline.learn.evaluate.line_statistics import by_chance, line_statistics
from pipeline.learn.evaluate.metrics import paired_scores
from pipeline.learn.evaluate.results import Evaluation, Line, Scores, answers_file, output_files, write_table
from pipeline.learn.keep_order import ROWS, measured_order
from pipeline.messages import LEAST_TIMED, counted
from pipeline.runtime.announce import RowProgress, announce


def evaluate(config: EvalConfig) -> Evaluation:
    """Answer the rows at every speed, score and time the answers, and write tables, answers and `evaluate.json`.

    Raises UserError, before a model is loaded, if the configuration or the data are wrong.
    """
    inputs = prepare(config)
    full, fast, others = load_models(inputs)
    inputs = with_measured_order(inputs, full)
    variants = speeds(inputs.spec, config.speedups, config.prompts)
    lines = {}
    for variant in variants:
        schedule = variant.spec.build(inputs.model.checkpoint.num_layers)
        lines[variant.name] = (full if schedule.is_full_depth else fast), schedule
    for name, model in others.items():
        line, other = {name: (model, model.schedule)}, [Variant(name, ScheduleSpec(), None)]
        is_first = name == REFERENCE  # the reference model becomes the first line, baselines the last ones
        variants, lines = (other + variants, line | lines) if is_first else (variants + other, lines | line)
    full_depth = variants[0].name

    runs = time_in_turn(lines, inputs.prompts, config.runs)
    announce(f"scoring {len(lines)} lines of {len(inputs.rows):,} answers")
    answers = {name: run.answers for name, run in runs.items()}
    labels = inputs.metric in ("exact_match", "agreement_exact")
    chance = {CHANCE: by_chance(answers[full_depth], labels=labels)}
    scores = paired_scores(line_statistics(inputs, lines, answers | chance, full_depth), full_depth)
    evaluation = Evaluation(
        lines=[_line(variant, runs[variant.name], runs["1x"], scores[variant.name]) for variant in variants],
        output=inputs.folder.path,
        rows=len(inputs.rows),
        batch=full.settings.max_batch,
        metric=inputs.metric,
        full_depth=full_depth,
        chance=scores[CHANCE],
    )
    _write(evaluation, inputs, runs, full)
    return evaluation


def load_models(inputs: EvalInputs) -> tuple[Generator, Generator, dict[str, Generator]]:
    """Load all models of an evaluation with the same batch size, so that all answer the rows in the same batches.

    Returns the model without its speed adapter, the model with its speed adapter (the same object if it has none), and
    line name -> reference model or baseline.
    """
    config, rows = inputs.config, f", for {counted(len(inputs.rows), 'row')}"
    announce(f"loading {config.model.path}{rows}")
    full = fast = inputs.load(inputs.model)
    if inputs.model.adapter is not None:
        announce(f"loading {config.model.path} with its speed adapter{rows}")
        fast = inputs.load(inputs.model, fast=True)
    others = {}
    for name, checkpoint in inputs.others.items():
        announce(f"loading {config.baselines.get(name, config.reference_model)}{rows}")
        others[name] = inputs.load(checkpoint)
    batch = min(common_batch(one, inputs.prompts, inputs.new_tokens) for one in (full, fast, *others.values()))
    full, fast, *rest = (one.at(one.schedule, max_batch=batch) for one in (full, fast, *others.values()))
    return full, fast, dict(zip(others, rest, strict=True))


def with_measured_order(inputs: EvalInputs, generator: Generator) -> EvalInputs:
    """Measure the layer order on full-depth answers if `schedule.keep_order` is `measured`. Return inputs with it."""
    model, schedule = inputs.config.model, inputs.config.schedule
    if schedule.keep_order != MEASURED:
        return inputs
    announce(f"answering {min(ROWS, len(inputs.rows))} rows at full depth to measure the keep order")
    answers = answer(generator, generator.schedule, inputs.prompts[:ROWS]).answers
    rows = [(prompt.ids, row.token_ids or ()) for prompt, row in zip(inputs.prompts, answers, strict=False)]
    identity = {**inputs.model.identity(), "dtype": model.dtype}
    order, warmup = measured_order(identity, lambda: generator.engine.decoder, rows, schedule.warmup, model.cache)
    return replace(inputs, spec=inputs.spec.overridden({"keep_order": order, "warmup": warmup}))


@dataclass
class TimedRun:
    """Answers of a line, and for each timed round the time of the whole run (`seconds`) and of its decode steps."""

    answers: list[Answer]
    stats: EngineStats
    seconds: list[float]
    decode_seconds: list[float]


def common_batch(generator: Generator, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Return how many rows fit the KV cache at full depth, at most max_batch. All schedules use this batch size.

    generator: at full depth. new_tokens: maximum tokens of an answer. Raises UserError if one row alone does not fit.
    """
    engine, longest = generator.engine, max(prompts, key=lambda prompt: len(prompt.ids))
    length, shortest = len(longest.ids), min(len(prompt.ids) for prompt in prompts)

    def row_bytes(prompt_tokens: int) -> int:
        """Return the maximum cache size of a row with `prompt_tokens` tokens, padded to the longest prompt."""
        return engine.row_bytes(length, max(1, min(new_tokens, engine.decoder.context_length - prompt_tokens)))

    if row_bytes(length) > generator.settings.cache_bytes:
        raise UserError(
            f"{longest.source}: row {longest.row}: needs {row_bytes(length)} bytes of cache at full depth, "
            f"but cache_bytes is {generator.settings.cache_bytes}; raise cache_bytes"
        )
    fitting = generator.settings.cache_bytes // max(1, row_bytes(shortest))  # 0 bytes if answers have only one token
    return max(1, min(generator.settings.max_batch, fitting))


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt], stage: str = "answering") -> TimedRun:
    """Answer all rows once. Progress lines begin with `stage`.

    Raises UserError if a row cannot be answered, or if memory runs out.
    """
    scheduled = generator.at(schedule)  # on a CPU this drops the buffers of earlier runs
    progress = RowProgress(stage, len(prompts))
    began = time.perf_counter()
    answers = scheduled.answer(prompts, on_batch=progress)
    seconds = time.perf_counter() - began
    bad = next((row for row in answers if row.error is not None), None)
    if bad is not None:
        raise UserError(f"{prompts[bad.row].source}: row {prompts[bad.row].row}: {bad.error}")
    stats = scheduled.take_stats()
    if stats.out_of_memory:  # batches without enough memory were split, so their times cannot be compared
        raise UserError(f"memory ran out {counted(stats.out_of_memory, 'time')}, so times are wrong: lower max_batch")
    return TimedRun(answers, stats, [seconds], [stats.decode_seconds])


def time_in_turn(
    lines: Mapping[str, tuple[Generator, Schedule]], prompts: Sequence[Prompt], rounds: int
) -> dict[str, TimedRun]:
    """Answer all rows with every line in turn, `rounds` times, so that a drift of the machine affects all lines.

    Each line first warms up on its largest batch. With several rounds, or on a GPU (where each new shape costs time), a
    line warms up on all rows. Returns line -> answers and counts of the last round, and times of all rounds.
    """
    whole = rounds > 1 or any(generator.device.type == "cuda" for generator, _ in lines.values())
    longest = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    for name, (generator, schedule) in lines.items():
        announce(f"warming up {name}")
        answer(generator, schedule, prompts if whole else longest[: generator.settings.max_batch])
    runs: dict[str, TimedRun] = {}
    for number in range(1, rounds + 1):
        for name, line in lines.items():
            stage = f"{name}, round {number} of {rounds}"
            announce(f"answering {len(prompts):,} rows at {stage}")
            run, last = answer(*line, prompts, stage), runs.get(name)
            if last is not None:
                run.seconds[:0] = last.seconds
                run.decode_seconds[:0] = last.decode_seconds
            runs[name] = run
    return runs


def _speedup(base: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the ratio of the medians of two lists of times; None if one list's sum is less than `LEAST_TIMED`."""
    return median(base) / median(seconds) if min(sum(base), sum(seconds)) >= LEAST_TIMED else None


def _line(variant: Variant, run: TimedRun, base: TimedRun, scores: Scores) -> Line:
    """Make a line of the table from `run`. base: the run at 1x, with which times are compared."""
    stats, seconds, decode = run.stats, median(run.seconds), median(run.decode_seconds)
    has_ratio = variant.nominal is not None and stats.layer_steps > 0
    signs = warnings_of([answer.generated_text or "" for answer in run.answers])
    return Line(
        name=variant.name,
        nominal=variant.nominal,
        prompt=variant.spec.prompt,
        layer_ratio=stats.full_layer_steps / stats.layer_steps if has_ratio else None,
        mean_depth=stats.layer_steps / stats.decode_steps if stats.decode_steps else None,
        seconds=seconds,
        decode_seconds=decode,
        tokens_per_second=stats.generated_tokens / seconds,
        timed_seconds=sum(run.seconds),
        wall_clock=_speedup(base.seconds, run.seconds),
        decode_wall_clock=_speedup(base.decode_seconds, run.decode_seconds),
        cache_bytes=stats.cache_bytes,
        scores=scores,
        warnings=tuple(text.rpartition(";")[0] for text in signs),  # without the advice after the last semicolon
    )


def _write(evaluation: Evaluation, inputs: EvalInputs, runs: Mapping[str, TimedRun], generator: Generator) -> None:
    """Remove the files of an earlier evaluation. Write the answers, the table and, last, the record of settings."""
    folder, columns = inputs.folder, _columns(inputs.rows)
    folder.discard(folder.files())
    folder.claim(output_files(runs))
    names = {"answer": "generated_text", "generated_tokens": "generated_tokens", "finish_reason": "finish_reason"}
    for line, run in runs.items():
        own = {name: [getattr(answer, field) for answer in run.answers] for name, field in names.items()}
        pq.write_table(pa.table({**columns, **own}), folder.path / answers_file(line))
    write_table(evaluation)
    folder.save(
        {
            "config": inputs.config.model_dump(mode="json"),
            "cache_bytes": generator.settings.cache_bytes,
            "version": version("skipdecode"),
            "device": generator.device_name(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
    )


def _columns(rows: Sequence[EvalRow]) -> dict[str, pa.Array]:
    """Return the input columns of the answers files: the prompt, and id and references if the data has them."""
    columns = {"id": _array([row.id for row in rows])} if any(row.id is not None for row in rows) else {}
    columns["prompt"] = _array([row.prompt for row in rows])
    return columns | ({"references": pa.array([list(row.references) for row in rows])} if rows[0].references else {})


def _array(values: Sequence[Any]) -> pa.Array:
    """Return the values as an array. If no type of `pa.array` holds all of them, they become text."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):  # such as ids of several types, or unsigned 64-bit integers
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v, default=str) for v in values])
