"""`skipdecode evaluate`: quality against speed, by the engine alone, without Ray.

    rows, checkpoints → lines → answers, timed in turn → statistics of rows → scores with intervals → tables

Quality: against references if there are any, and always against full depth and against chance. Speed is three numbers:
nominal, layer ratio over the decode steps that ran, and wall clock against the same engine at full depth, over the same
rows in the same batches, of the whole run and of decode alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from actors.generator import Generator
from pipeline.config.evaluate import EvalConfig
from pipeline.learn.evaluate.inputs import REFERENCE, EvalInputs, EvalRow, Variant, prepare, speeds
from pipeline.learn.evaluate.intervals import paired_scores
from pipeline.learn.evaluate.line_statistics import CHANCE, by_chance, line_statistics
from pipeline.learn.evaluate.results import (
    Evaluation,
    Line,
    Scores,
    answer_warnings,
    output_files,
    write_answers,
    write_table,
)
from pipeline.learn.evaluate.timed_runs import TimedRun, answer, common_batch, time_in_turn
from pipeline.learn.keep_order import ROWS, measured_order
from pipeline.runtime.announce import announce


def evaluate(config: EvalConfig) -> Evaluation:
    """Answer the rows at every speed, score and time them; write tables, answers and a record of the settings.

    Raises UserError of one line for a mistake, before a model is loaded.
    """
    inputs = prepare(config)
    full, fast, others = load_models(inputs)
    inputs = with_measured_order(inputs, full)
    variants = speeds(inputs.spec, config.speedups, config.prompts)
    lines = {}
    for variant in variants:
        schedule = variant.spec.build(inputs.num_layers)
        lines[variant.name] = (full if schedule.is_full_depth else fast), schedule
    for name, model in others.items():
        line = {name: (model, model.schedule)}
        is_reference = name == REFERENCE
        other = [Variant(name, "reference" if is_reference else "model", ScheduleSpec(), None)]
        variants, lines = (other + variants, line | lines) if is_reference else (variants + other, lines | line)
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
        batch=full.max_batch,
        metric=inputs.metric,
        full_depth=full_depth,
        chance=scores[CHANCE],
    )
    _write(evaluation, inputs, runs, full)
    return evaluation


def load_models(inputs: EvalInputs) -> tuple[Generator, Generator, dict[str, Generator]]:
    """Load all models of an evaluation. All of them answer the rows in the same batches.

    Return the model without and with its speed adapter, the same one twice without an adapter; and the reference model
    and the baselines, by the names of their lines.
    """
    config, rows = inputs.config, f", for {len(inputs.rows):,} rows"
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
    """Return the inputs; if the recipe asks, with a keep order measured on full-depth answers of the first rows."""
    model, schedule = inputs.config.model, inputs.config.schedule
    if schedule.keep_order != MEASURED:
        return inputs
    announce(f"answering {min(ROWS, len(inputs.rows))} rows at full depth for the keep order")
    answers = answer(generator, generator.schedule, inputs.prompts[:ROWS]).answers
    rows = [(prompt.ids, row.token_ids or ()) for prompt, row in zip(inputs.prompts, answers, strict=False)]
    identity = {**inputs.model.identity(), "dtype": model.dtype}
    order, warmup = measured_order(identity, lambda: generator.engine.decoder, rows, schedule.warmup, model.cache)
    return replace(inputs, spec=inputs.spec.overridden({"keep_order": order, "warmup": warmup}))


def _line(variant: Variant, run: TimedRun, base: TimedRun, scores: Scores) -> Line:
    """Return the line of a run. base: the run at 1x, for the speed-ups. A line of another model has no layer ratio."""
    stats, seconds, decode = run.stats, median(run.seconds), median(run.decode_seconds)
    own_layers = variant.group not in ("reference", "model")
    return Line(
        name=variant.name,
        group=variant.group,
        nominal=variant.nominal,
        prompt=variant.spec.prompt,
        layer_ratio=stats.full_layer_steps / stats.layer_steps if stats.layer_steps and own_layers else None,
        mean_depth=stats.layer_steps / stats.decode_steps if stats.decode_steps else None,
        seconds=seconds,
        decode_seconds=decode,
        tokens_per_second=stats.generated_tokens / seconds,
        wall_clock=median(base.seconds) / seconds,
        decode_wall_clock=median(base.decode_seconds) / decode if decode else 1.0,
        cache_bytes=stats.cache_bytes,
        scores=scores,
        warnings=answer_warnings(run.answers),
    )


def _write(evaluation: Evaluation, inputs: EvalInputs, runs: Mapping[str, TimedRun], generator: Generator) -> None:
    """Replace the files of the last evaluation. The record, written last, holds the settings of these numbers."""
    folder = inputs.folder
    folder.discard(folder.files())
    folder.claim(output_files(runs))
    write_answers(folder.path, _columns(inputs.rows), {name: run.answers for name, run in runs.items()})
    write_table(evaluation)
    folder.save(
        {
            "config": inputs.config.model_dump(mode="json"),
            "cache_bytes": generator.cache_bytes,
            "version": version("skipdecode"),
            "device": generator.device_name(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
    )


def _columns(rows: Sequence[EvalRow]) -> dict[str, list[Any]]:
    """Return the rows' own columns in the files of answers: id and references if the data has them, and prompt."""
    prompts: list[Any] = [row.prompt for row in rows]
    if any(isinstance(prompt, str) for prompt in prompts):  # if some prompts are texts, token ids are written as text
        prompts = [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in prompts]
    columns = {"id": [row.id for row in rows]} if any(row.id is not None for row in rows) else {}
    columns["prompt"] = prompts
    return columns | ({"references": [list(row.references) for row in rows]} if rows[0].references else {})
