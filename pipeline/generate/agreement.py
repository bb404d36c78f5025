"""Measures how often a job's schedule agrees with full depth on a sample of the job's rows. Runs in an actor's process.

The model answers the rows greedily at full depth. For free text, the agreement is the share of these answers' tokens at
which the schedule and full depth have the same likeliest token. The KL divergence is measured too. For labels, the
agreement is the share of rows that get the same label from both. The agreement by chance is that of answers which do
not depend on the row: full depth's most frequent label, or the tokens of another row's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from actors.answers import Answer, Prompt
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from actors.generator import Generator
from pipeline.config.job import StorageConfig
from pipeline.generate.settings import fetched
from pipeline.generate.stage import prompts
from pipeline.generate.stats import ratio
from pipeline.input.files import InputFile
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard
from pipeline.messages import counted
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import prepare_table

MOST_TOKENS = 256  # maximum number of tokens of an answer that are compared


@dataclass(frozen=True)
class Example:
    """Full depth's greedy answer to a row."""

    content: str  # digest of the row's file, or its version if it has no digest
    row: int  # number of the row in the file
    text: str


@dataclass(frozen=True)
class Agreement:
    """Agreement of a schedule's answers with the answers at full depth."""

    rows: int = 0  # number of compared rows, without rows that failed, or whose answers cannot differ
    labels: bool = False  # True: one label for each row was compared; False: tokens were compared
    compared: int = 0  # number of labels or tokens that were compared
    agreed: int = 0  # number of compared labels or tokens that agree
    token_kl: float = 0.0  # KL(full depth || schedule) in nats, mean over all compared tokens
    prompt_tokens: float = 0.0  # mean number of prompt tokens per row
    answer_tokens: float = 0.0  # mean number of answer tokens per row
    skipped: float | None = None  # share of layer runs that the schedule skips; None if `MOST_TOKENS` cut an answer
    examples: tuple[Example, ...] = ()  # full depth's answers that have fewer than `MOST_TOKENS` tokens
    prefill_ratio: float | None = None  # prefill time at full depth ÷ prefill time with the schedule; None if not timed
    decode_ratio: float | None = None  # time of a row's decode step at full depth ÷ that with the schedule
    by_chance: int | None = None  # how many of the `compared` labels or tokens would agree by chance
    kappa: float | None = None  # Cohen's kappa of the labels; None for tokens

    @property
    def share(self) -> float | None:
        """Share of the compared labels or tokens that agree; None if nothing was compared."""
        return self.agreed / self.compared if self.compared else None

    def __str__(self) -> str:
        if self.share is None:
            return "not measured: no sampled row has a token that the schedule can change"
        unit = "labels" if self.labels else "tokens"
        chance = "" if self.by_chance is None else f" (chance: {self.by_chance / self.compared:.2f})"
        kappa = "" if self.kappa is None else f", Cohen's kappa {self.kappa:.2f}"
        # if full depth gives every row the same label, agreement by chance is 1, and nothing is called useless
        is_useless = self.by_chance is not None and self.agreed <= self.by_chance < self.compared
        useless = "; at or below chance: useless" if is_useless else ""
        return (
            f"{self.share:.2f} of {self.compared:,} {unit} as at full depth{chance}{kappa}, token KL "
            f"{self.token_kl:.2g} nats, over {counted(self.rows, 'row')}{useless}"
        )


def read_prompts(
    shards: Sequence[Shard], files: Sequence[InputFile], schema: pa.Schema, storage: StorageConfig, spec: PromptSpec
) -> list[Prompt]:
    """Read the rows of shards, and return their prompts."""
    return [
        prompt
        for shard, table in read_shards(files, shards, schema, storage)
        for prompt in prompts(prepare_table(table, spec), shard)
    ]


def measure_agreement(
    rows: Sequence[Shard],
    files: Sequence[InputFile],
    schema: pa.Schema,
    storage: StorageConfig,
    spec: PromptSpec,
    generator: Mapping[str, Any],
) -> Agreement:
    """Answer rows at full depth and with the schedule, and compare the answers. Rows that fail are left out.

    rows: the sample, one shard for each row. The rows' own sampling parameters are ignored. generator: arguments of
    `Generator`, in which checkpoint and speed adapter are sources for `fetch`.
    """
    from actors.engine.library.divergence import Model, teacher_forced

    read = read_prompts(rows, files, schema, storage, spec)
    given = [replace(prompt, sampling={}) for prompt in read if prompt.error is None]
    if not given:
        return Agreement()
    full, fast = _generators(generator, len(given))
    first = 1 if len(fast.schedule.prompt_layers) == fast.schedule.num_layers else 0  # first token that can differ
    at_full, full_stats = _answers(full, given)
    answers = [answer for answer in at_full if len(answer.token_ids or ()) > first]
    if not answers:
        return Agreement()
    fast_answers, fast_stats = _answers(fast, given)
    asked = [given[answer.row] for answer in answers]
    ids = [answer.token_ids or () for answer in answers]
    at_full_depth, at_speed = (Model(one.engine.decoder, one.schedule) for one in (full, fast))
    pairs = [(prompt.ids, tokens) for prompt, tokens in zip(asked, ids, strict=True)]
    [scores] = teacher_forced(at_full_depth, [at_speed], pairs, first=first)
    compared, agreed, kappa = int(scores.tokens.sum()), int(scores.agreed.sum()), None
    token_kl = float(scores.kl.sum()) / compared
    labels = generator["choices"] is not None or any(prompt.choices for prompt in asked)
    if labels:
        at_speed_texts = {answer.row: answer.generated_text for answer in fast_answers}
        both = [(answer.generated_text, at_speed_texts[answer.row]) for answer in answers]
        compared, agreed = len(answers), sum(own == other for own, other in both)
        by_chance, kappa = chance_of(both)
    else:
        by_chance = sum(
            own == other
            for own_ids, other_ids in zip(ids, [*ids[1:], ids[0]], strict=True)
            for own, other in zip(own_ids[first:], other_ids[first:], strict=False)
        )
    prompt_tokens = sum(len(prompt.ids) for prompt in asked)
    lengths = [len(tokens) for tokens in ids]
    full_step, fast_step = (one.decode_seconds / max(one.decode_steps, 1) for one in (full_stats, fast_stats))
    contents = {file.url: file.digest or file.version for file in files}
    return Agreement(
        rows=len({answer.row for answer in answers}),
        labels=labels,
        compared=compared,
        agreed=agreed,
        by_chance=by_chance if len(answers) > 1 else None,
        kappa=kappa,
        token_kl=token_kl,
        prompt_tokens=prompt_tokens / len(answers),
        answer_tokens=sum(lengths) / len(answers),
        examples=tuple(
            Example(contents[prompt.source], prompt.row, answer.generated_text)
            for prompt, answer, length in zip(asked, answers, lengths, strict=True)
            if answer.generated_text is not None and length < MOST_TOKENS
        ),
        skipped=None if MOST_TOKENS in lengths else skipped_share(fast.schedule, prompt_tokens, lengths),
        prefill_ratio=ratio(full_stats.prefill_seconds, fast_stats.prefill_seconds) or None if first == 0 else 1.0,
        decode_ratio=ratio(full_step, fast_step) or None,
    )


def chance_of(labels: Sequence[tuple[str | None, str | None]]) -> tuple[int, float]:
    """Return how often full depth gives its most frequent label, and Cohen's kappa. labels: (full depth, schedule)."""
    full, fast = (Counter(column) for column in zip(*labels, strict=True))
    expected = sum(full[label] * fast[label] for label in full) / len(labels)
    agreed = sum(own == other for own, other in labels)
    kappa = (agreed - expected) / (len(labels) - expected) if expected < len(labels) else 0.0
    return max(full.values()), kappa


def _answers(generator: Generator, given: Sequence[Prompt]) -> tuple[list[Answer], EngineStats]:
    """Answer one row to warm up, then all rows. Return the answers to all rows, and the engine's statistics of them."""
    generator.answer(given[:1])
    generator.take_stats()
    return generator.answer(given), generator.take_stats()


def skipped_share(schedule: Schedule, prompt_tokens: int, answers: Sequence[int]) -> float:
    """Return the share of full depth's layer runs that a schedule skips. answers: number of tokens in each answer."""
    steps = [max(tokens - 1, 0) for tokens in answers]
    run = len(schedule.prompt_layers) * prompt_tokens + sum(schedule.layer_steps(count) for count in steps)
    return 1 - run / (schedule.num_layers * max(prompt_tokens + sum(steps), 1))


def _generators(generator: Mapping[str, Any], rows: int) -> tuple[Generator, Generator]:
    """Return two greedy generators: one at full depth without a speed adapter, and one with the job's schedule."""
    sampling = generator["sampling"]
    most = min(sampling["max_new_tokens"], MOST_TOKENS)
    greedy = {"temperature": 0.0, "n": 1, "logprobs": None, "max_new_tokens": most}
    settings = {
        **fetched(generator),
        "sampling": {**sampling, **greedy, "min_new_tokens": min(sampling["min_new_tokens"], most)},
        "cumulative_logprob": False,
        "max_batch": min(generator["max_batch"], rows),
    }
    adapted = settings["speed_adapter"] is not None
    if adapted:  # there are two models, each with a cache
        settings["cache_bytes"] //= 2
    full = Generator(**{**settings, "speed_adapter": None, "schedule": {"speedup": 1.0}})
    return full, Generator(**settings) if adapted else full.at(generator["schedule"])
