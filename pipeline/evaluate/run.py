"""`skipdecode evaluate`: quality against speed, on the engine alone, without Ray.

    rows, checkpoints → lines → answers, timed in turn → statistics of rows → scores with intervals → tables, plot

Quality: against references where there are any, and against full depth always. Speed is three numbers, never one:
nominal, layer ratio over the decode steps really run, and wall clock against the same engine at full depth, over
the same rows in the same batches, whole and for decode alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from actors.engine.schedule import ScheduleSpec
from actors.engine.schedule_file import SCHEDULE_FILE
from actors.engine.schedule_variants import Variant, comparisons, speeds
from actors.generator import Generator
from pipeline.config.evaluate import EvalConfig
from pipeline.evaluate.inputs import REFERENCE, Subject, prepare
from pipeline.evaluate.intervals import paired_scores
from pipeline.evaluate.layer_ranking import learned_order
from pipeline.evaluate.plot import write_plot
from pipeline.evaluate.results import Evaluation, Line, Score, output_files
from pipeline.evaluate.row_statistics import metrics_of, row_statistics
from pipeline.evaluate.tables import write_answers, write_table
from pipeline.evaluate.timed_runs import Run, answer, common_batch, time_in_turn

__all__ = ["Evaluation", "Line", "Score", "evaluate"]

OTHERS = ("reference", "model")  # groups of lines of other models, whose layers are not those of ours
LEARNED_ROWS = 64  # prompts that a learned keep order follows from


def evaluate(config: EvalConfig, source: str) -> Evaluation:
    """Answer the rows at every speed, score and time them; write tables, plot and answers into `config.output`.

    And `evaluate.json`: what made them.

    Raises ValueError of one line for bad input, before a model is loaded.
    """
    subject = prepare(config, source)
    planned = speeds(subject.spec, list(dict.fromkeys([1.0, *config.speedups])))
    generator, reference, beside = load(subject)
    if config.compare is not None:
        planned += _compared(subject, generator, planned, config.compare)
    lines = {one.name: (generator, one.spec.build(subject.num_layers)) for one in planned}
    if reference is not None:
        planned = [Variant(REFERENCE, "reference", ScheduleSpec(), None), *planned]
        lines = {REFERENCE: (reference, reference.schedule), **lines}
    full_depth = planned[0].name
    planned += [Variant(name, "model", ScheduleSpec(), None) for name in beside]
    lines |= {name: (other, other.schedule) for name, other in beside.items()}

    runs = time_in_turn(lines, subject.prompts, config.runs, full_depth, config.model.compile)
    with Console(stderr=True).status(f"scoring {len(lines)} lines of {len(subject.rows):,} answers"):
        statistics = row_statistics(subject, lines, runs, full_depth, metrics_of(subject))
        scores = paired_scores(statistics, full_depth, config.bootstrap)
    evaluation = Evaluation(
        lines=[_line(one, runs[one.name], runs["1x"], scores[one.name]) for one in planned],
        output=Path(config.output),
        rows=len(subject.rows),
        batch=generator.max_batch,
        metric=subject.metric,
        full_depth=full_depth,
        confidence=config.bootstrap.confidence,
    )
    folder = subject.folder
    folder.discard(folder.files() - {SCHEDULE_FILE})  # a search's schedule stays
    folder.claim(output_files(runs))
    write_answers(evaluation.output, subject.rows, {name: run.answers for name, run in runs.items()})
    write_table(evaluation)
    write_plot(evaluation)
    folder.save(_made_by(config, generator))
    return evaluation


def load(subject: Subject) -> tuple[Generator, Generator | None, dict[str, Generator]]:
    """The model, the reference model if there is one, and those beside, cutting the rows into the same batches."""
    generator = subject.load(subject.model)
    reference = None if subject.reference is None else subject.load(subject.reference)
    beside = {name: subject.load(found) for name, found in subject.beside.items()}
    everyone = [generator, *([] if reference is None else [reference]), *beside.values()]
    batch = min(common_batch(one, subject.prompts, subject.new_tokens) for one in everyone)
    for one in everyone:
        one.max_batch = batch
    return generator, reference, beside


def _compared(subject: Subject, generator: Generator, planned: Sequence[Variant], speedup: float) -> list[Variant]:
    """The built-in comparisons at the mean depth of one speed, over answers as long as full depth's are.

    Without the first, the paper's own schedule, if that is planned already.
    """
    layers = subject.num_layers
    run = answer(generator, generator.schedule, subject.prompts[:LEARNED_ROWS])
    pairs = [(prompt.ids, one.token_ids or ()) for prompt, one in zip(subject.prompts, run.answers, strict=False)]
    order: Sequence[int] | None = subject.config.learned_order
    if order is None:
        console = Console(stderr=True, soft_wrap=True)
        with console.status(f"learning a keep order from {len(pairs)} answers"):
            order = learned_order(generator.engine.decoder, pairs, subject.spec.warmup)
        console.print(f"learned_order: {list(order)}", highlight=False)
    tokens = round(sum(len(response) for _, response in pairs) / len(pairs))
    paper, *others = comparisons(subject.spec, layers, speedup, tokens, order)
    known = [one.spec.build(layers).to_dict() for one in planned]
    return others if paper.spec.build(layers).to_dict() in known else [paper, *others]


def _made_by(config: EvalConfig, generator: Generator) -> dict[str, Any]:
    """What the numbers hang on, beside the files that the configuration names."""
    return {
        "config": config.model_dump(mode="json"),
        "cache_bytes": generator.cache_bytes,
        "version": version("skipdecode"),
        "device": generator.device_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _line(variant: Variant, run: Run, base: Run, scores: Mapping[str, Score]) -> Line:
    """base: 1x, whose seconds the wall clocks are against."""
    stats = run.stats
    own = variant.group not in OTHERS
    seconds, decode = run.median_seconds, run.median_decode_seconds
    return Line(
        name=variant.name,
        group=variant.group,
        nominal=variant.nominal,
        layer_ratio=stats.full_layer_steps / stats.layer_steps if stats.layer_steps and own else None,
        mean_depth=stats.layer_steps / stats.decode_steps if stats.decode_steps else None,
        seconds=seconds,
        decode_seconds=decode,
        tokens_per_second=stats.generated_tokens / seconds,
        wall_clock=base.median_seconds / seconds,
        decode_wall_clock=base.median_decode_seconds / decode if decode else 1.0,
        cache_bytes=stats.cache_bytes,
        scores=dict(scores),
    )
