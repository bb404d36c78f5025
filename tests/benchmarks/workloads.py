"""What the contestants answer: prompts of random tokens, and how many new tokens each row takes, the same for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
    """prompts: token ids of each row. new: tokens that each row generates, no more and no less. limit: what a user
    would give as max_new_tokens, who does not know `new`."""

    name: str
    prompts: list[list[int]]
    new: list[int]
    limit: int

    @property
    def generated(self) -> int:
        return sum(self.new)

    @property
    def horizon(self) -> int:
        """Of the engine's schedules: the median length, 2 at least."""
        return max(2, sorted(self.new)[len(self.new) // 2])


def equal(prompt: int, new: int) -> Callable[[random.Random, int], list[tuple[int, int]]]:
    """All rows alike."""
    return lambda chance, rows: [(prompt, new)] * rows


def drawn(folder: str, most_prompt: int) -> Callable[[random.Random, int], list[tuple[int, int]]]:
    """Rows of a data set's test split; lengths in words, taken as tokens."""

    def lengths(chance: random.Random, rows: int) -> list[tuple[int, int]]:
        table = pq.read_table(DATA / folder / "test.parquet", columns=["prompt", "references"]).to_pylist()
        pairs = [(row["prompt"], chance.choice(row["references"])) for row in chance.choices(table, k=rows)]
        return [(min(tokens(prompt), most_prompt), tokens(answer)) for prompt, answer in pairs]

    return lengths


def tokens(text: str) -> int:
    """About so many tokens has a text."""
    return max(1, round(TOKENS_A_WORD * len(text.replace("[", " ").split())))


def long_tailed(median: int, sigma: float) -> Callable[[random.Random, int], list[tuple[int, int]]]:
    """Prompts of 32 tokens; answers lognormal, cut at 1,024."""

    def lengths(chance: random.Random, rows: int) -> list[tuple[int, int]]:
        return [(32, min(1024, max(1, round(median * chance.lognormvariate(0, sigma))))) for _ in range(rows)]

    return lengths


KINDS = {
    "prompt-heavy": equal(64, 64),
    "decode-heavy": equal(32, 256),
    "e2e": drawn("e2e", 256),
    "qmsum": drawn("qmsum", 1500),
    "long-tailed": long_tailed(128, 0.8),
}


def available(kind: str) -> bool:
    """Whether the data that a workload's lengths are drawn from are there."""
    return kind not in ("e2e", "qmsum") or (DATA / kind / "test.parquet").exists()


def make(kind: str, rows: int, vocabulary: int, context: int) -> Workload:
    """The workload of so many rows, the same at every call; no prompt longer than half the context, no row than it."""
    chance = random.Random(f"{SEED} {kind}")
    lengths = [(min(prompt, context // 2), new) for prompt, new in KINDS[kind](chance, rows)]
    new_tokens = [min(new, context - prompt) for prompt, new in lengths]
    prompts = [[chance.randrange(4, vocabulary) for _ in range(prompt)] for prompt, _ in lengths]
    return Workload(kind, prompts, new_tokens, max(new_tokens))


class Forced(StopStrings):
    """Ends a row at its n-th token, which nobody can foresee."""

    def __init__(self, new: int) -> None:
        self.new = new

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` ends the answer."""
        return len(tokens) >= self.new
