"""Every metric's statistics of every row, for lines that have answered: against references, against full depth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from actors.engine.schedule import Schedule
from actors.generator import Generator
from pipeline.evaluate.divergence import Model, teacher_forced
from pipeline.evaluate.inputs import Subject
from pipeline.evaluate.metrics import (
    Array,
    bleu_statistics,
    exact_match_statistics,
    rouge_l_statistics,
    same_statistics,
    warn_of_other_scripts,
)
from pipeline.evaluate.timed_runs import Run

FORCED = ("token_kl", "perplexity")


def metrics_of(subject: Subject) -> tuple[str, ...]:
    """Names of the metrics that the subject's rows allow: those of references, of texts for labels not."""
    against_references: tuple[str, ...] = ()
    if subject.config.data.references is not None:
        against_references = ("exact_match",) if subject.is_labelling else ("bleu", "rouge_l", "exact_match")
    return (*against_references, "agreement_exact", "agreement_rouge_l", *FORCED)


def row_statistics(
    subject: Subject,
    lines: Mapping[str, tuple[Generator, Schedule]],
    runs: Mapping[str, Run],
    full_depth: str,
    wanted: Collection[str],
) -> dict[str, dict[str, Array]]:
    """Line -> metric -> statistics [N, K] of the N rows. full_depth: the line that agreement is with."""
    expected = runs[full_depth].texts
    references = [row.references for row in subject.rows]
    statistics: dict[str, dict[str, Array]] = {}
    if {"rouge_l", "agreement_rouge_l"} & set(wanted):
        warn_of_other_scripts(expected)
    for name, run in runs.items():
        of_texts: dict[str, Callable[[], Array]] = {
            "bleu": partial(bleu_statistics, run.texts, references),
            "rouge_l": partial(rouge_l_statistics, run.texts, references),
            "exact_match": partial(exact_match_statistics, run.texts, references),
            "agreement_exact": partial(same_statistics, run.texts, expected),
            "agreement_rouge_l": partial(rouge_l_statistics, run.texts, [[text] for text in expected]),
        }
        statistics[name] = {metric: make() for metric, make in of_texts.items() if metric in wanted}
    if not any(metric in wanted for metric in FORCED):
        return statistics
    pairs = [
        (prompt.ids, one.token_ids or ()) for prompt, one in zip(subject.prompts, runs[full_depth].answers, strict=True)
    ]
    models = {name: Model(generator.engine.decoder, schedule) for name, (generator, schedule) in lines.items()}
    forced = teacher_forced(models[full_depth], [models[name] for name in runs], pairs, subject.config.max_batch)
    for name, scores in zip(runs, forced, strict=True):
        for metric, values in (("token_kl", scores.kl), ("perplexity", scores.nll)):
            if metric in wanted:
                statistics[name][metric] = np.stack([values, scores.tokens], axis=1)
    return statistics
