"""What the contestants answer: prompts of random tokens, and how many new tokens each row takes, the same for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from actors.engine.sampling.stopping import StopStrings

DATA = Path(__file__).parents[3] / "shared" / "data"
TOKENS_A_WORD = 1.3  # of English text under common vocabularies; meaning representations have more
SEED = 11
CONTEXT = 2048  # tokens; as far as the workloads go


@dataclass(frozen=True)
class Workload:
    """prompts: token ids of each row. new: tokens that each row generates, no more and no less."""

    prompts: list[list[int]]
    new: list[int]

    @property
    def generated(self) -> int:
        return sum(self.new)

    @property
    def horizon(self) -> int:
        """Of the engine's schedules: the median length, 2 at least."""
        return max(2, sorted(self.new)[len(self.new) // 2])


KINDS = ("prompt-heavy", "decode-heavy", "e2e", "qmsum", "long-tailed")
MOST_PROMPT = {"e2e": 256, "qmsum": 1500}  # tokens; of kinds whose lengths are drawn from a data set's test split


def lengths(kind: str, chance: random.Random, rows: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of each row; a data set's are counted by words."""
    if kind == "prompt-heavy":
        return [(64, 64)] * rows
    if kind == "decode-heavy":
        return [(32, 256)] * rows
    if kind == "long-tailed":  # answers lognormal, cut at 1,024
        return [(32, min(1024, max(1, round(128 * chance.lognormvariate(0, 0.8))))) for _ in range(rows)]
    table = pq.read_table(DATA / kind / "test.parquet", columns=["prompt", "references"]).to_pylist()
    pairs = [(row["prompt"], chance.choice(row["references"])) for row in chance.choices(table, k=rows)]
    return [(min(tokens(prompt), MOST_PROMPT[kind]), tokens(answer)) for prompt, answer in pairs]


def tokens(text: str) -> int:
    """About so many tokens has a text."""
    return max(1, round(TOKENS_A_WORD * len(text.replace("[", " ").split())))


def available(kind: str) -> bool:
    """Whether the data that a workload's lengths are drawn from are there."""
    return kind not in MOST_PROMPT or (DATA / kind / "test.parquet").exists()


def make(kind: str, rows: int, vocabulary: int, context: int) -> Workload:
    """The workload of so many rows, the same at every call; no prompt longer than half the context, no row than it."""
    chance = random.Random(f"{SEED} {kind}")
    pairs = [(min(prompt, context // 2), new) for prompt, new in lengths(kind, chance, rows)]
    new_tokens = [min(new, context - prompt) for prompt, new in pairs]
    prompts = [[chance.randrange(4, vocabulary) for _ in range(prompt)] for prompt, _ in pairs]
    return Workload(prompts, new_tokens)


class Forced(StopStrings):
    """Ends a row at its n-th token, which nobody can foresee."""

    def __init__(self, new: int) -> None:
        self.new = new

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` ends the answer."""
        return len(tokens) >= self.new
