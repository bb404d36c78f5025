"""`skipdecode evaluate --search`: the cheapest schedule whose quality stays within a tolerance of full depth.

A measurement answers all rows, so they are few: bisection, down one chain of candidates after the other. Few
measurements also keep the choice honest: the best of many noisy ones would be the luckiest. The choice depends on the
rows, so they must be dev data: the score of the chosen schedule on them is no estimate for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.engine.errors import UserError
from actors.engine.schedules.file import SCHEDULE_FILE, save_spec
from actors.engine.schedules.schedule import ScheduleSpec, depths_for_speedup
from actors.engine.schedules.variants import Variant
from pipeline.config.evaluate import EvalConfig
from pipeline.evaluate.inputs import EvalInputs, prepare
from pipeline.evaluate.intervals import paired_scores
from pipeline.evaluate.line_statistics import available_metrics, line_statistics
from pipeline.evaluate.metrics import METRICS
from pipeline.evaluate.results import Score, bracketed
from pipeline.evaluate.run import load_models, with_measured_order
from pipeline.evaluate.timed_runs import answer
from pipeline.runtime.announce import announce
from pipeline.runtime.wide_console import wide

SPEED_STEP = 20  # candidates have nominal speed-ups that are multiples of 1 / SPEED_STEP
MOST = 32  # measurements; two chains of candidates need about 15


@dataclass(frozen=True)
class Goal:
    """What the search looks for: the cheapest schedule whose quality loss is within the tolerance.

    Args:
        tolerance: 0 or above, in units of the metric. The upper end of the confidence interval of the loss against full
            depth must not exceed it.
        metric: a key of `METRICS`; None: the default metric of the rows.
    """

    tolerance: float
    metric: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """best: the cheapest schedule measured within the tolerance, if any. tried: in the order measured.

    complete: false if the limit of measurements was reached before every chain was settled; a cheaper one may exist.
    """

    best: Variant | None
    tried: tuple[tuple[Variant, Score], ...]
    complete: bool

    def summary(self, tolerance: float) -> str:
        """One line for the user."""
        cut = "" if self.complete else "; the search was cut short, allow it more measurements"
        number = f"{len(self.tried)} schedules measured"
        if not self.tried:
            return "search: there is no schedule below full depth to try; nothing is written"
        if self.best is None:
            variant, score = min(self.tried, key=lambda measured: measured[1].loss_high)
            return (
                f"search: no schedule stays within tolerance = {tolerance:g} of full depth ({number}; nearest "
                f"{variant.name}, loss up to {score.loss_high:.4g}); nothing is written{cut}"
            )
        loss = next(score.loss_high for variant, score in self.tried if variant == self.best)
        return f"search: {self.best.name} is the cheapest with a loss of at most {loss:.4g} ({number}){cut}"


@dataclass(frozen=True)
class SearchReport:
    """A search with its goal. file: the schedule written; None if none is within the tolerance."""

    result: SearchResult
    metric: str
    tolerance: float
    file: Path | None


def parse_goal(text: str) -> Goal:
    """The goal of ``metric=bleu,tolerance=0.5`` or ``tolerance=0.5``. Raises UserError for anything else."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
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


def search_schedule(config: EvalConfig, goal: Goal) -> SearchReport:
    """Search, and write the schedule found as `skipdecode.json` into `config.output`.

    Raises UserError of one line for a mistake, before a model is loaded.
    """
    alone = config.model_copy(update={"compare": None, "learned_order": None, "baselines": {}})
    inputs = prepare(alone, search=True)
    available, metric = available_metrics(inputs), goal.metric or inputs.metric
    if metric not in available:
        raise UserError(f"--search metric={metric}: not for these rows, which allow {', '.join(available)}")
    candidates(inputs.spec, inputs.num_layers, config.sampling.max_new_tokens)  # raises before a model is loaded
    models = load_models(inputs)
    inputs = with_measured_order(inputs, models.base or models.model)
    full_name = "full depth"
    lines = {full_name: (models.full_depth, models.full_depth.schedule)}
    announce(f"answering {len(inputs.rows):,} rows at {full_name}")
    runs = {full_name: answer(*lines[full_name], inputs.prompts, full_name)}
    tokens = round(sum(row.generated_tokens for row in runs[full_name].answers) / len(inputs.rows))

    def measure(variant: Variant) -> Score:
        announce(f"answering {len(inputs.rows):,} rows at {variant.name}")
        schedule = variant.spec.build(inputs.num_layers)
        run = answer(models.model, schedule, inputs.prompts, variant.name)
        both = {**lines, variant.name: (models.model, schedule)}
        statistics = line_statistics(inputs, both, {**runs, variant.name: run}, full_name, {metric})
        return paired_scores(statistics, full_name, config.bootstrap)[variant.name][metric]

    result = search(candidates(inputs.spec, inputs.num_layers, tokens), measure, goal.tolerance, MOST)
    return SearchReport(result, metric, goal.tolerance, _write(result, inputs))


def _write(result: SearchResult, inputs: EvalInputs) -> Path | None:
    inputs.folder.discard([SCHEDULE_FILE])  # of an earlier search
    if result.best is None:
        return None
    inputs.folder.claim([SCHEDULE_FILE])
    # the file will replace that of the checkpoint; the recipe may name another order or warm-up
    trained, best = inputs.model.checkpoint.trained, result.best.spec.build(inputs.num_layers)
    same = trained is not None and (trained.keep_order, trained.warmup) == (best.keep_order, best.warmup)
    save_spec(result.best.spec, inputs.num_layers, inputs.folder.path, trained if same else None)
    return inputs.folder.path / SCHEDULE_FILE


def print_search(console: Console, report: SearchReport, data: str) -> None:
    """Print the schedules tried, in order, and the one chosen. data: names of the input files."""
    metric = METRICS[report.metric]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, name in enumerate(("tried", metric.title, "loss", f"within {report.tolerance:g}")):
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    for variant, score in report.result.tried:
        table.add_row(
            variant.name,
            bracketed(score.value, score.low, score.high, metric.decimals),
            bracketed(score.loss, score.loss_low, score.loss_high, metric.decimals, signed=True),
            "yes" if score.loss_high <= report.tolerance else "no",
        )
    console = wide(console)
    console.print(table)
    console.print(f"\n{report.result.summary(report.tolerance)}")
    if report.file is not None:
        console.print(
            f"schedule: {report.file}; copy it into the checkpoint's folder, or give a job its keys,\n"
            f"but num_layers, as `schedule`. It was chosen on {data}: that must be\n"
            "dev data; score it with `evaluate` on rows that had no part in the choice."
        )


def candidates(
    spec: ScheduleSpec, num_layers: int, tokens: int, decays: Sequence[str] = ("linear", "constant")
) -> list[Variant]:
    """Schedules below full depth of each decay, cheapest first by mean depth over `tokens` generated tokens.

    A falling decay is tried at nominal speed-ups in fine steps, a constant one at every integer depth; all other keys
    are those of `spec`. No two have the same depths. Raises UserError if a schedule cannot be built.
    """
    lowest = min(spec.warmup + 1, num_layers)
    by_depths: dict[tuple[int, ...], tuple[float, Variant]] = {}
    for decay in decays:
        made: list[tuple[float, ScheduleSpec]] = []
        if decay == "constant":
            for depth in range(num_layers - 1, lowest - 1, -1):
                flat = {"decay": decay, "max_depth": depth, "min_depth": depth}
                made.append((num_layers / depth, spec.overridden(flat)))
        else:
            ranges: dict[tuple[int, int], float] = {}
            for step in count(SPEED_STEP + 1):
                depths = depths_for_speedup(num_layers, step / SPEED_STEP, spec.warmup)
                ranges.setdefault(depths, step / SPEED_STEP)
                if depths == (lowest, lowest):
                    break
            for speedup in ranges.values():
                made.append((speedup, spec.overridden({"decay": decay, "speedup": speedup})))
        for nominal, changed in made:
            schedule = changed.build(num_layers)
            effective = schedule.depths
            while len(effective) > 1 and effective[-1] == effective[-2]:
                effective = effective[:-1]  # the last one holds for all later positions
            if effective == (num_layers,) or effective in by_depths:
                continue
            cost = schedule.layer_steps(max(tokens - 1, 1))
            name = f"{nominal:.4g}x {decay}"
            by_depths[effective] = (cost, Variant(name, "decay" if decay != "constant" else "depth", changed, nominal))
    return [
        variant for _, variant in sorted(by_depths.values(), key=lambda entry: (entry[0], -(entry[1].nominal or 0)))
    ]


def search(
    candidates: Sequence[Variant], measure: Callable[[Variant], Score], tolerance: float, most: int
) -> SearchResult:
    """The cheapest of `candidates`, which are ordered by cost, whose `loss_high` is at most `tolerance`.

    Candidates that differ only in their depths form a chain. If loss never rises with depth along each chain, the
    result is the cheapest of all, after at most 1 + log2(n + 1) measurements for each chain of n; otherwise a
    cheaper one may be missed, but the result itself was measured within the tolerance. Never more than `most`
    measurements. Raises UserError if `most` is below 1.
    """
    if most < 1:
        raise UserError(f"most = {most}: allow at least one measurement")
    tried: list[tuple[Variant, Score]] = []
    best: int | None = None  # index of a candidate
    complete = True
    chains: dict[ScheduleSpec, list[int]] = {}
    for index, variant in enumerate(candidates):
        chains.setdefault(_without_depth(variant.spec), []).append(index)
    for chain in chains.values():
        cheaper = [index for index in chain if best is None or index < best]
        # candidates below `low` fail, or are assumed to; `high` passes, or is the end; first the decisive one
        low, high = 0, len(cheaper)
        probe = high - 1 if best is not None else (low + high) // 2
        while low < high:
            if len(tried) == most:
                complete = False
                break
            score = measure(candidates[cheaper[probe]])
            tried.append((candidates[cheaper[probe]], score))
            if score.loss_high <= tolerance:
                high, best = probe, cheaper[probe]
            else:
                low = probe + 1
            probe = (low + high) // 2
    return SearchResult(None if best is None else candidates[best], tuple(tried), complete)


def _without_depth(spec: ScheduleSpec) -> ScheduleSpec:
    return replace(spec, speedup=None, max_depth=None, min_depth=None, depths=None)
