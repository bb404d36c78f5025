"""Statistics of every row for each metric and line: against references and against full depth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from actors.engine.library.divergence import Model, Pair, answer_regret, teacher_forced
from actors.engine.schedule.schedule import Schedule
from actors.generator import Generator
from pipeline.learn.evaluate.inputs import EvalInputs
from pipeline.learn.evaluate.metrics import (
    Array,
    answer_statistics,
    bleu_statistics,
    exact_match_statistics,
    rouge_l_statistics,
    same_statistics,
    warn_of_other_scripts,
)
from pipeline.learn.evaluate.timed_runs import TimedRun
from pipeline.runtime.announce import RowProgress

FORCED = ("token_kl", "perplexity")  # over full depth's answers
OF_ANSWERS = ("fidelity", "length_ratio", "repetition")  # over the line's own


def available_metrics(inputs: EvalInputs) -> tuple[str, ...]:
    """Names of the metrics that the rows allow: BLEU and ROUGE-L need references that are no labels."""
    against_references: tuple[str, ...] = ()
    if inputs.config.data.references is not None:
        against_references = ("exact_match",) if inputs.is_labelling else ("bleu", "rouge_l", "exact_match")
    of_answers = OF_ANSWERS if inputs.config.choices is None else ()
    return (*against_references, "agreement_exact", "agreement_rouge_l", *of_answers, *FORCED)


def line_statistics(
    inputs: EvalInputs,
    lines: Mapping[str, tuple[Generator, Schedule]],
    runs: Mapping[str, TimedRun],
    full_depth: str,
    metrics: Collection[str],
) -> dict[str, dict[str, Array]]:
    """Line -> metric -> statistics [N, K] of the N rows.

    full_depth: the line that agreement is measured against. metrics: names of those to compute.
    """
    expected = runs[full_depth].texts
    references = [row.references for row in inputs.rows]
    statistics: dict[str, dict[str, Array]] = {}
    if {"rouge_l", "agreement_rouge_l"} & set(metrics):
        warn_of_other_scripts(expected)
    for name, run in runs.items():
        of_texts: dict[str, Callable[[], Array]] = {
            "bleu": partial(bleu_statistics, run.texts, references),
            "rouge_l": partial(rouge_l_statistics, run.texts, references),
            "exact_match": partial(exact_match_statistics, run.texts, references),
            "agreement_exact": partial(same_statistics, run.texts, expected),
            "agreement_rouge_l": partial(rouge_l_statistics, run.texts, [[text] for text in expected]),
        }
        statistics[name] = {metric: make() for metric, make in of_texts.items() if metric in metrics}
    models = {name: Model(generator.engine.decoder, schedule) for name, (generator, schedule) in lines.items()}
    if of_answers := set(metrics) & set(OF_ANSWERS):
        found = _of_answers(inputs, models[full_depth], runs, full_depth, score="fidelity" in of_answers)
        for name, values in found.items():
            statistics[name] |= dict.fromkeys((metric for metric in OF_ANSWERS if metric in of_answers), values)
    if not any(metric in metrics for metric in FORCED):
        return statistics
    pairs = _pairs(inputs, runs[full_depth])
    report = RowProgress("scoring full depth's answers", len(pairs)).at
    forced = teacher_forced(models[full_depth], [models[name] for name in runs], pairs, report=report)
    for name, scores in zip(runs, forced, strict=True):
        for metric, values in (("token_kl", scores.kl), ("perplexity", scores.nll)):
            if metric in metrics:
                statistics[name][metric] = np.stack([values, scores.tokens], axis=1)
    return statistics


def _of_answers(
    inputs: EvalInputs, full: Model, runs: Mapping[str, TimedRun], full_depth: str, *, score: bool
) -> dict[str, Array]:
    """Line -> statistics of its answers beside full depth's own.

    score: whether full depth reads the answers, for their regret; an answer that several lines give it reads once.
    """
    own = [ids for _, ids in _pairs(inputs, runs[full_depth])]
    by_line = {name: _pairs(inputs, run) for name, run in runs.items()}
    regret_of: dict[tuple[int, tuple[int, ...]], float] = {}
    if score:
        numbered = [(row, pair) for each in by_line.values() for row, pair in enumerate(each)]
        distinct = {(row, tuple(pair[1])): pair for row, pair in numbered}
        report = RowProgress("scoring the lines' own answers", len(distinct)).at
        regret = answer_regret(full, list(distinct.values()), report)
        regret_of = dict(zip(distinct, regret.tolist(), strict=True))
    statistics = {}
    for name, each in by_line.items():
        answers = [ids for _, ids in each]
        regret = np.array([regret_of.get((row, tuple(ids)), 0.0) for row, ids in enumerate(answers)])
        statistics[name] = answer_statistics(answers, own, regret)
    return statistics


def _pairs(inputs: EvalInputs, run: TimedRun) -> list[Pair]:
    """Token ids of each row's prompt and answer."""
    return [(prompt.ids, answer.token_ids or ()) for prompt, answer in zip(inputs.prompts, run.answers, strict=True)]
