"""Computes the statistics of all answers for all metrics. A line of the table is a speed, a model, or chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from actors.answers import Answer, Prompt
from actors.engine.schedule.schedule import Schedule
from actors.engine.torch.divergence import Model, Pair, answer_regret, teacher_forced
from actors.generator import Generator
from pipeline.learn.score.metrics import (
    Array,
    answer_statistics,
    bleu_statistics,
    exact_match_statistics,
    mean_statistics,
    rouge_l_statistics,
)
from pipeline.runtime.announce import RowProgress

Answers = Sequence[Answer]


def by_chance(answers: Answers, *, labels: bool) -> Answers:
    """Return answers that ignore the prompt: the next row's answer or, with `labels`, always the commonest answer."""
    if not labels:
        return [*answers[1:], answers[0]]
    commonest, _ = Counter(answer.generated_text for answer in answers).most_common(1)[0]
    return [next(answer for answer in answers if answer.generated_text == commonest)] * len(answers)


def line_statistics(
    prompts: Sequence[Prompt],
    references: Sequence[Sequence[str]] | None,
    lines: Mapping[str, tuple[Generator, Schedule]],
    answers: Mapping[str, Answers],
    full_depth: str,
    *,
    labels: bool,
    choices: bool,
) -> dict[str, dict[str, Array]]:
    """Return line -> metric -> array [rows, statistics], for each metric that can be computed for these rows.

    Args:
        references: Right answers of each row.
        answers: The answers of each line, and of the line of chance, which has no model and thus no token_kl.
        full_depth: Name of the line that agreement is measured against.
        labels: Whether the answers are labels: then there are no metrics of texts.
        choices: Whether the job sets the labels: then there is no fidelity, as the model could not choose another text.
    """
    texts = {name: [answer.generated_text or "" for answer in given] for name, given in answers.items()}
    expected, statistics = texts[full_depth], dict[str, dict[str, Array]]()
    for name, own in texts.items():
        found = statistics[name] = {}
        if references is not None:
            if not labels:
                found["bleu"] = bleu_statistics(own, references)
                found["rouge_l"] = rouge_l_statistics(own, references)
            found["exact_match"] = exact_match_statistics(own, references)
        found["agreement_exact"] = mean_statistics([one == other for one, other in zip(own, expected, strict=True)])
    models = {name: Model(generator.engine.decoder, schedule) for name, (generator, schedule) in lines.items()}
    pairs: dict[str, list[Pair]] = {
        name: [(prompt.ids, answer.token_ids or ()) for prompt, answer in zip(prompts, given, strict=True)]
        for name, given in answers.items()
    }
    if not choices:
        regret = _regret(models[full_depth], pairs)
        lengths = [ids for _, ids in pairs[full_depth]]
        for name, each in pairs.items():
            statistics[name]["fidelity"] = answer_statistics([ids for _, ids in each], lengths, regret[name])
    report = RowProgress("scoring full depth's answers", len(prompts)).at
    forced = teacher_forced(models[full_depth], list(models.values()), pairs[full_depth], report=report)
    for name, scores in zip(models, forced, strict=True):
        statistics[name]["token_kl"] = np.stack([scores.kl, scores.tokens], axis=1)
    return statistics


def _regret(full: Model, pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Array]:
    """Return line -> regret of its answer to each row (see `answer_regret`). Equal answers to a row are scored once."""
    distinct = {(row, tuple(pair[1])): pair for each in pairs.values() for row, pair in enumerate(each)}
    report = RowProgress("scoring the lines' own answers", len(distinct)).at
    found = dict(zip(distinct, answer_regret(full, list(distinct.values()), report).tolist(), strict=True))
    return {
        name: np.array([found[row, tuple(ids)] for row, (_, ids) in enumerate(each)]) for name, each in pairs.items()
    }
