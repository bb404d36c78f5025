"""A row's output length foretold from its prompt, by linear regression over a data set's training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from workloads import DATA, tokens


def features(prompt: str, most_prompt: int) -> list[float]:
    """What is known when a job is planned: the prompt's tokens as far as they are kept, those of its first line (of
    QMSum's prompts the question), and how many attributes it names (of E2E's)."""
    first_line = tokens(prompt.split("\n", 1)[0])
    return [1.0, min(tokens(prompt), most_prompt), min(first_line, most_prompt), prompt.count("[")]


@dataclass(frozen=True)
class LengthPredictor:
    """weights: tokens of the answer for one of each feature."""

    weights: tuple[float, ...]
    most_prompt: int

    def predict(self, prompts: Sequence[str]) -> list[float]:
        """Tokens that each prompt's answer may have."""
        return list(np.array([features(prompt, self.most_prompt) for prompt in prompts]) @ np.array(self.weights))


def fit(folder: str, most_prompt: int) -> LengthPredictor:
    """Least squares over the training split of a data set; most_prompt: tokens that are kept of a prompt."""
    table = pq.read_table(DATA / folder / "train.parquet", columns=["prompt", "reference"]).to_pylist()
    known = np.array([features(row["prompt"], most_prompt) for row in table])
    wanted = np.array([tokens(row["reference"]) for row in table])
    weights, *_ = np.linalg.lstsq(known, wanted, rcond=None)
    return LengthPredictor(tuple(weights.tolist()), most_prompt)


def explained(predicted: Sequence[float], true: Sequence[int]) -> float:
    """R²: share of the lengths' variance that the prediction explains; below 0 it is worse than their mean."""
    wanted = np.array(true)
    return float(1 - ((wanted - np.array(predicted)) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum())
