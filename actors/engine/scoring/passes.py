"""Batches of prompts and their continuations through the layers and the vocabulary head, for `score`.

Shapes: S states, P prompts, E hidden size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.forcing.token_tree import Level, Tokens, prompt_ranks, prompt_tokens, run_level
from actors.engine.protocol import EngineProtocol
from actors.engine.scoring.batches import PASS_TOKENS, Continuation, Group, Prompt, cut_passes, groups_of
from actors.engine.scoring.types import ContinuationScore
from actors.engine.types import TokenLogprob

LOGITS_AT_ONCE = 2**25  # numbers of logits that exist together; 128 MiB in fp32


class Scorer:
    """Runs batches of prompts that all begin with one prefix, whose keys and values it keeps."""

    def __init__(self, engine: EngineProtocol, prefix: Sequence[int]) -> None:
        self.decoder, self.schedule, self.stats = engine.decoder, engine.schedule, engine.stats
        self.before = len(prefix)
        began = time.perf_counter()
        self.shared = self._prompts([prefix], 0, [])[0] if prefix else []
        self._count(len(prefix), began)

    def run(self, batch: Sequence[Prompt]) -> dict[tuple[int, int], ContinuationScore]:
        """Scores by number of request and number within it."""
        began = time.perf_counter()
        levels, last = self._prompts([prompt.ids[self.before :] for prompt in batch], self.before, self.shared)
        found = _Found(self.decoder)
        for number, prompt in enumerate(batch):
            for one in prompt.continuations:
                found.expect(one, 0, number)
        found.predict(last)
        for groups in cut_passes(groups_of(batch), batch):
            self._continuations(batch, groups, levels, found)
        scores = found.scores()
        stats = self.stats
        stats.batches += 1
        stats.cache_bytes = max(stats.cache_bytes, sum(level.bytes for level in levels))
        for prompt in batch:
            stats.shared_prompt_tokens += len(prompt.ids) * len(prompt.continuations) - len(prompt.ids) + self.before
            for one in prompt.continuations:
                steps = len(one.ids) - 1
                stats.generated_tokens += len(one.ids)
                stats.decode_steps += steps
                stats.layer_steps += self.schedule.layer_steps(steps)
                stats.full_layer_steps += self.schedule.num_layers * steps
        self._count(sum(len(prompt.ids) - self.before for prompt in batch), began)
        return scores

    def _count(self, prompt_tokens: int, began: float) -> None:
        self.stats.prompt_tokens += prompt_tokens
        self.stats.padded_prompt_tokens += prompt_tokens
        self.stats.prefill_seconds += time.perf_counter() - began

    def _prompts(self, rows: Sequence[Sequence[int]], start: int, above: Sequence[Level]) -> tuple[list[Level], Tensor]:
        """Levels of prompts' tokens from position `start` on, and the states [P, E] of their last ones."""
        levels: list[Level] = []
        hidden = torch.empty(0)
        ranks, longest = prompt_ranks(self.schedule), max(map(len, rows))
        assert len(rows) == 1 or longest <= PASS_TOKENS
        chunk = rows
        for first in range(0, longest, PASS_TOKENS):
            chunk = [row[first : first + PASS_TOKENS] for row in rows]
            tokens = prompt_tokens(chunk, start + first)
            hidden, level = run_level(self.decoder, tokens, ranks, len(rows), [*above, *levels])
            levels.append(level)
        ends = torch.tensor(list(itertools.accumulate(map(len, chunk))), device=hidden.device) - 1
        return levels, hidden[0, ends]

    def _continuations(
        self, batch: Sequence[Prompt], groups: Sequence[Group], levels: Sequence[Level], found: _Found
    ) -> None:
        """Run continuations, of several groups in one chunk each, or of a single one in as many as it needs."""
        owners = [group.prompt for group in groups]
        same = len(batch) == 1 or owners == list(range(len(batch)))
        rows = None if same else torch.tensor(owners, device=self.decoder.device)
        above = [*self.shared, *(replace(level, rows=rows) for level in levels)]
        ranks = torch.tensor([self.schedule.ranks])
        longest = max(group.longest for group in groups)
        for first in range(0, longest, PASS_TOKENS):
            fields: list[tuple[int, int, int, int, int]] = []
            for number, group in enumerate(groups):
                start = len(batch[group.prompt].ids)
                for branch, one in enumerate(group.continuations):
                    for place in range(first, min(first + PASS_TOKENS, len(one.ids) - 1)):
                        found.expect(one, place + 1, len(fields))
                        fields.append((one.ids[place], start + place, number, branch, self.schedule.depth(place)))
            hidden, level = run_level(self.decoder, Tokens(*torch.tensor(fields).T), ranks, len(groups), above)
            found.predict(hidden[0])
            above.append(level)


class _Found:
    """The scores of a batch as they are computed: first what a pass predicts is named, then its states come."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._tokens: dict[tuple[int, int], list[TokenLogprob]] = {}
        self._greedy: dict[tuple[int, int], list[bool]] = {}
        self._expected: list[tuple[Continuation, int, int]] = []

    def expect(self, one: Continuation, place: int, state: int) -> None:
        """Token `place` of a continuation is predicted by this state; states come in their order."""
        self._expected.append((one, place, state))

    def predict(self, states: Tensor) -> None:
        """Account for all that is expected of states [S, E]."""
        device, expected, self._expected = states.device, self._expected, []
        of = torch.tensor([state for *_, state in expected])
        labels = torch.tensor([one.ids[place] for one, place, _ in expected])
        most = max(one.top for one, *_ in expected)
        size = max(1, LOGITS_AT_ONCE // self.decoder.vocab_size)
        for first in range(0, len(states), size):
            begin, end = (int(torch.searchsorted(of, bound)) for bound in (first, first + size))
            if begin == end:
                continue
            logits = self.decoder.logits(states[first : first + size]).float()
            row, label = of[begin:end].to(device) - first, labels[begin:end].to(device)
            total = logits.logsumexp(-1)
            logprobs = (logits[row, label] - total[row]).tolist()
            greedy = (logits.argmax(-1)[row] == label).tolist()
            best = logits.topk(min(most, logits.shape[-1]))  # none if nobody asks for any
            values, ids = (best.values - total[:, None]).tolist(), best.indices.tolist()
            for number in range(begin, end):
                one, place, state = expected[number]
                likeliest = zip(ids[state - first], values[state - first], strict=True)
                top = tuple(itertools.islice(likeliest, one.top))
                tokens = self._tokens.setdefault((one.request, one.number), [])
                assert len(tokens) == place
                tokens.append(TokenLogprob(one.ids[place], logprobs[number - begin], top))
                self._greedy.setdefault((one.request, one.number), []).append(greedy[number - begin])

    def scores(self) -> dict[tuple[int, int], ContinuationScore]:
        """All of them."""
        return {key: ContinuationScore(tuple(tokens), tuple(self._greedy[key])) for key, tokens in self._tokens.items()}
