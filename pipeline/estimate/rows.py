"""A sample of a job's rows: their prompts, and answers' lengths to draw for the rows that were not answered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from actors.answers import Prompt
from pipeline.config.job import StorageConfig
from pipeline.estimate.measure import Answered
from pipeline.estimate.simulate import SimulatedRow
from pipeline.generate.stage import prompts
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import prepare_table
from pipeline.read.files import InputFile
from pipeline.read.rows import read_shards
from pipeline.read.shards import Shard

PREPARED_ROWS = 2048  # that are tokenized, at most
PLACES = 16  # of the input that they are read from
NEIGHBOURS = 16  # answered rows of the most similar prompts, one of whose answers a row is taken to have


def sample_places(shards: Sequence[Shard], rows: int = PREPARED_ROWS) -> list[Shard]:
    """Beginnings of shards, evenly spread, that hold at most `rows` rows; all shards if they hold no more."""
    if sum(shard.rows for shard in shards) <= rows:
        return list(shards)
    count = min(PLACES, len(shards))
    chosen = [shards[place * len(shards) // count] for place in range(count)]
    return [replace(shard, rows=min(shard.rows, rows // count)) for shard in chosen]


def read_prompts(
    places: Sequence[Shard], files: Sequence[InputFile], schema: pa.Schema, storage: StorageConfig, spec: PromptSpec
) -> tuple[list[Prompt], float]:
    """The prompts of the rows of some places, and the seconds that a row took once the tokenizer is loaded."""
    found: list[Prompt] = []
    seconds = 0.0
    for place, table in read_shards(files, places, schema, storage):
        if not found:
            prepare_table(table.slice(0, 1), spec)  # loads the tokenizer
        began = time.perf_counter()
        found += prompts(prepare_table(table, spec), place.url, place.first_row)
        seconds += time.perf_counter() - began
    return found, seconds / max(len(found), 1)


class Rows:
    """Rows of the job as the scheduler sees them, some of them guessed.

    Args:
        known: prompts by file and row number, those with an error too; others have the prompt of one of these.
        answered: sampled answers, at least one.
        samples: answers a prompt.
        random: of all guesses.
    """

    def __init__(
        self,
        known: Mapping[tuple[str, int], Prompt],
        answered: Sequence[Answered],
        samples: int,
        random: np.random.Generator,
    ) -> None:
        self.known, self.samples, self.random = known, samples, random
        self.prompts = list(known.values())
        self.answered = sorted(answered, key=lambda one: one.prompt_tokens)
        self.lengths = np.array([one.prompt_tokens for one in self.answered])

    def of(self, shard: Shard) -> list[SimulatedRow]:
        """The shard's rows, without those that have an error."""
        guessed = self.random.integers(len(self.prompts), size=shard.rows)
        rows = []
        for offset in range(shard.rows):
            prompt = self.known.get((shard.url, shard.first_row + offset)) or self.prompts[guessed[offset]]
            if prompt.error is None:
                rows += [self._row(prompt, offset) for _ in range(self.samples)]
        return rows

    def _row(self, prompt: Prompt, source: int) -> SimulatedRow:
        place = int(np.searchsorted(self.lengths, len(prompt.ids)))
        first = max(0, min(place - NEIGHBOURS // 2, len(self.answered) - NEIGHBOURS))
        near = min(NEIGHBOURS, len(self.answered))
        answer = self.answered[first + int(self.random.integers(near))]
        return SimulatedRow(prompt.ids, answer.limit, answer.tokens, source)
