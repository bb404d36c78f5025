"""Scores speeds: answers rows with the engine alone, without Ray, and measures quality and time.

    rows, models ──> lines ──> answers, timed in turn ──> statistics of rows ──> scores with intervals

A line is one speed or model. Quality is measured against full depth and chance, and against references if there are
any. Speed is measured by the nominal speed-up, by the layer ratio of the decode steps, and by the times of the whole
run and of its decode steps. All are relative to full depth on the same engine, rows and batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from actors.answers import Prompt
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.machine import process_memory
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.generator import Generator
from pipeline.answer.answer_checks import warnings_of
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch
from pipeline.config.adapt import OF_TEXTS
from pipeline.config.job import JobConfig, ModelConfig
from pipeline.learn.score.lines import Evaluation, Line, Scores
from pipeline.learn.score.metrics import default_metric, is_label, paired_scores
from pipeline.learn.score.statistics import by_chance, line_statistics
from pipeline.learn.score.timing import TimedRun, clock_speedup, common_batch, greedy_settings, time_in_turn
from pipeline.learn.speeds import Variant
from pipeline.messages import counted
from pipeline.prepare.tokenizer import tokenize_labels
from pipeline.runtime.announce import announce

REFERENCE = "reference model"  # name of the model in `others` that all lines are compared with
CHANCE = "chance"  # name of the line for answers that do not depend on the prompt


def score(
    config: JobConfig,
    model: ResolvedCheckpoint,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    references: Sequence[Sequence[str]] | None = None,
    *,
    others: Mapping[str, Path] | None = None,
    metric: str | None = None,
    runs: int = 1,
) -> Evaluation:
    """Answer the prompts with every variant, and score and time the answers.

    Args:
        config: The job, of which model, sampling, choices and actors are used. Sampling is greedy.
        model: The job's checkpoint, with its speed adapter if it has one.
        variants: Schedules to score. The first one has full depth.
        references: Right answers of each row, one or more. None: answers are compared only with those at full depth.
        others: Name -> folder of another model with the same tokenizer, answered at full depth. All lines are compared
            with the one named `REFERENCE`, if there is one; else with the first variant.
        metric: Main metric. None: see `default_metric`.
        runs: How often each line is timed.

    Raises:
        UserError: there are fewer than two rows, `metric` is for texts but the references are labels, or another model
            has another tokenizer, all before a model is loaded; or a row cannot be answered.
    """
    others = others or {}
    if len(prompts) < 2:
        raise UserError(f"{counted(len(prompts), 'row')} to score, but intervals need 2 or more; add rows")
    labels = config.choices is not None or (
        references is not None and all(is_label(text) for row in references for text in row)
    )
    if labels and metric in OF_TEXTS:
        raise UserError(f"adapt.metric: {metric} is not a metric for labels (single words); use exact_match")
    for name, folder in others.items():
        if load_tokenizer(folder).get_vocab() != load_tokenizer(model.checkpoint.path).get_vocab():
            raise UserError(f"{name}: {folder} has another tokenizer than {config.model.path}")
    full, fast, further = _load_models(config, model, prompts, others)
    lines: dict[str, tuple[Generator, Schedule]] = {}
    for variant in variants:
        schedule = variant.spec.build(model.checkpoint.num_layers)
        lines[variant.name] = (full if schedule.is_full_depth else fast), schedule
    for name, generator in further.items():
        line, other = {name: (generator, generator.schedule)}, [Variant(name, ScheduleSpec(), None)]
        is_first = name == REFERENCE
        variants, lines = ([*other, *variants], line | lines) if is_first else ([*variants, *other], lines | line)
    full_depth, base = variants[0].name, next(one.name for one in variants if one.nominal is not None)

    timed = time_in_turn(lines, prompts, runs)
    announce(f"scoring {len(lines)} lines of {len(prompts):,} answers")
    answers = {name: run.answers for name, run in timed.items()}
    lengths = [len(answer.token_ids or ()) for answer in answers[full_depth]]
    metric = metric or default_metric(references, lengths, choices=config.choices is not None)
    chance = {CHANCE: by_chance(answers[full_depth], labels=metric in ("exact_match", "agreement_exact"))}
    statistics = line_statistics(
        prompts, references, lines, answers | chance, full_depth, labels=labels, choices=config.choices is not None
    )
    scores = paired_scores(statistics, full_depth)
    return Evaluation(
        lines=[_line(variant, timed[variant.name], timed[base], scores[variant.name]) for variant in variants],
        answers=answers,
        batch=full.settings.max_batch,
        metric=metric,
        full_depth=full_depth,
        chance=scores[CHANCE],
    )


def _load_models(
    config: JobConfig, model: ResolvedCheckpoint, prompts: Sequence[Prompt], others: Mapping[str, Path]
) -> tuple[Generator, Generator, dict[str, Generator]]:
    """Load all models with the same batch size, so that all answer the rows in the same batches.

    Returns the model without its speed adapter, the model with its speed adapter (the same object if it has none), and
    name -> other model.
    """
    rows, folder = f", for {counted(len(prompts), 'row')}", fetch(model.source)
    announce(f"loading {config.model.path}{rows}")
    full = fast = _load(config, folder, config.model)
    if model.adapter is not None:
        announce(f"loading {config.model.path} with its speed adapter{rows}")
        fast = _load(config, folder, config.model, fetch(model.adapter))
    further = {}
    for name, other in others.items():
        announce(f"loading {other}{rows}")
        further[name] = _load(config, other, config.model.model_copy(update={"weights": None}))
    new_tokens = config.sampling.max_new_tokens
    if config.choices is not None:
        ids, end = tokenize_labels(full.tokenizer, config.choices), full.tokenizer.eos_token_id
        new_tokens = ChoiceTrie([ids[label] for label in config.choices], [end]).most_tokens
    batch = min(common_batch(one, prompts, new_tokens) for one in (full, fast, *further.values()))
    full, fast, *rest = (one.at(one.schedule, max_batch=batch) for one in (full, fast, *further.values()))
    return full, fast, dict(zip(further, rest, strict=True))


def _load(config: JobConfig, folder: Path, model: ModelConfig, adapter: Path | None = None) -> Generator:
    """Load the checkpoint in `folder`, with the speed adapter merged if there is one. Its schedule has full depth.

    It runs on the project's own engine, because vLLM gives no logits for a schedule that skips layers.
    """
    actors = config.actors
    device = "cpu" if model.device == "auto" and not (actors.gpus and torch.cuda.is_available()) else model.device
    settings = greedy_settings(
        config,
        folder,
        adapter,
        # the adapter is merged only if the model is loaded with a schedule that skips layers
        schedule={"speedup": 1.0} if adapter is None else {"depths": (1,), "warmup": 0, "keep_order": "early_exit"},
        weights=model.weights,
        device=device,
        cache_bytes=actors.cache_bytes or (min(2**30, process_memory() // 4) if device == "cpu" else 8 * 2**30),
    )
    generator = Generator(settings)
    return generator.at(ScheduleSpec().build(generator.schedule.num_layers))


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
        wall_clock=clock_speedup(base.seconds, run.seconds),
        decode_wall_clock=clock_speedup(base.decode_seconds, run.decode_seconds),
        cache_bytes=stats.cache_bytes,
        scores=scores,
        uniform=variant.is_uniform,
        warnings=tuple(text.rpartition(";")[0] for text in signs),  # without the advice after the last semicolon
    )
