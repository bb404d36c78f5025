"""`skipdecode evaluate --search`: the cheapest schedule that costs no more quality than a tolerance.

The choice follows the rows, so they must be dev data: its score on them is no estimate for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.engine.errors import UserError
from actors.engine.schedule_file import SCHEDULE_FILE, save_spec
from actors.engine.schedule_variants import Variant
from pipeline.config.evaluate import EvalConfig
from pipeline.evaluate.inputs import Subject, prepare
from pipeline.evaluate.intervals import paired_scores
from pipeline.evaluate.metrics import METRICS
from pipeline.evaluate.results import Score
from pipeline.evaluate.row_statistics import metrics_of, row_statistics
from pipeline.evaluate.run import load
from pipeline.evaluate.search import Result, candidates, search
from pipeline.evaluate.tables import WIDTH, bracketed
from pipeline.evaluate.timed_runs import answer

MOST = 32  # measurements; two chains of candidates need about 15


@dataclass(frozen=True)
class Goal:
    """tolerance: loss of the metric that the interval's upper end may reach. metric: None, the rows' own."""

    tolerance: float
    metric: str | None = None


@dataclass(frozen=True)
class Outcome:
    """found: what was tried. file: the schedule that was written, None if none fits."""

    found: Result[Score]
    metric: str
    tolerance: float
    file: Path | None


def parse_goal(text: str) -> Goal:
    """``metric=bleu,tolerance=0.5`` or ``tolerance=0.5``; ValueError says what is wrong."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (one.strip() for one in part.partition("="))
        if not equals or key not in ("metric", "tolerance") or key in values:
            raise UserError(f"--search {text}: must look like tolerance=0.5 or metric=bleu,tolerance=0.5")
        values[key] = value
    if "metric" in values and values["metric"] not in METRICS:
        raise UserError(f"--search {text}: unknown metric {values['metric']}; known: {', '.join(METRICS)}")
    try:
        tolerance = float(values["tolerance"])
    except (KeyError, ValueError):
        raise UserError(f"--search {text}: needs a number as tolerance, such as tolerance=0.5") from None
    if not 0 <= tolerance < float("inf"):
        raise UserError(f"--search {text}: tolerance must be 0 or above")
    return Goal(tolerance, values.get("metric"))


def search_schedule(config: EvalConfig, source: str, goal: Goal) -> Outcome:
    """Search, and write the schedule found as `skipdecode.json` into `config.output`.

    Raises ValueError of one line for bad input, before a model is loaded.
    """
    subject = prepare(
        config.model_copy(update=dict.fromkeys(("compare", "learned_order")) | {"beside": {}}), source, search=True
    )
    known, metric = metrics_of(subject), goal.metric or subject.metric
    if metric not in known:
        raise UserError(f"--search metric={metric}: not for these rows, which allow {', '.join(known)}")
    candidates(subject.spec, subject.num_layers, config.sampling.max_new_tokens)  # refused now, if ever
    generator, reference, _ = load(subject)
    full = reference or generator
    full_name = "full depth"
    lines = {full_name: (full, full.schedule)}
    runs = {full_name: answer(full, full.schedule, subject.prompts)}
    tokens = round(sum(one.generated_tokens for one in runs[full_name].answers) / len(subject.rows))

    def measure(variant: Variant) -> Score:
        schedule = variant.spec.build(subject.num_layers)
        both = {**lines, variant.name: (generator, schedule)}
        answered = {**runs, variant.name: answer(generator, schedule, subject.prompts)}
        statistics = row_statistics(subject, both, answered, full_name, {metric})
        return paired_scores(statistics, full_name, config.bootstrap)[variant.name][metric]

    found = search(candidates(subject.spec, subject.num_layers, tokens), measure, goal.tolerance, MOST)
    return Outcome(found, metric, goal.tolerance, _write(found, subject))


def print_search(console: Console, outcome: Outcome, data: str) -> None:
    """What was tried, in order, and what follows."""
    metric = METRICS[outcome.metric]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(("tried", metric.title, "loss", f"within {outcome.tolerance:g}")):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for variant, score in outcome.found.tried:
        table.add_row(
            variant.name,
            bracketed(score.value, score.low, score.high, metric.decimals),
            bracketed(score.loss, score.loss_low, score.loss_high, metric.decimals, signed=True),
            "yes" if score.loss_high <= outcome.tolerance else "no",
        )
    wide = Console(file=console.file, width=max(console.width, WIDTH), soft_wrap=True, highlight=False)
    wide.print(table)
    wide.print(f"\n{outcome.found.summary(outcome.tolerance)}")
    if outcome.file is not None:
        wide.print(
            f"schedule: {outcome.file}; copy it into the checkpoint's folder, or give a job its keys,\n"
            f"but num_layers, as `schedule`. It was chosen on {data}: that must be\n"
            "dev data; score it with `evaluate` on rows that had no part in the choice."
        )


def _write(found: Result[Score], subject: Subject) -> Path | None:
    subject.folder.discard([SCHEDULE_FILE])  # of a search before
    if found.best is None:
        return None
    subject.folder.claim([SCHEDULE_FILE])
    save_spec(found.best.spec, subject.num_layers, subject.folder.path)
    return subject.folder.path / SCHEDULE_FILE
