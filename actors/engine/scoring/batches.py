"""How requests to score share passes: equal prompts, batches of prompts, groups of continuations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from actors.engine.scoring.types import ScoreRequest

PASS_TOKENS = 2048  # tokens of a pass through the layers, at most; products need no more to be efficient
PASS_KEYS = 8 * PASS_TOKENS  # keys of a pass over several groups, padding included, at most
LEAST_GROUP = 64  # tokens of continuations that attend to one copy of their prompt's keys, if there are so many


@dataclass(frozen=True)
class Continuation:
    """A continuation on its way: number of its request, number within it, token ids, alternatives to return."""

    request: int
    number: int
    ids: Sequence[int]
    top: int


@dataclass(frozen=True)
class Prompt:
    """A distinct prompt and all of its continuations."""

    ids: tuple[int, ...]
    continuations: list[Continuation]

    @property
    def longest(self) -> int:
        return max((len(one.ids) for one in self.continuations), default=0)


@dataclass(frozen=True)
class Group:
    """Continuations of one prompt of a batch that attend to one copy of its keys. prompt: its number."""

    prompt: int
    continuations: list[Continuation]

    @property
    def tokens(self) -> int:
        """Inputs of all continuations."""
        return sum(len(one.ids) - 1 for one in self.continuations)

    @property
    def longest(self) -> int:
        """Inputs of the longest one."""
        return max(len(one.ids) - 1 for one in self.continuations)


def distinct(requests: Sequence[ScoreRequest]) -> list[Prompt]:
    """The different prompts of requests with a continuation, longest first, so that memory runs out first if at all."""
    prompts: dict[tuple[int, ...], Prompt] = {}
    for number, request in enumerate(requests):
        for each, ids in enumerate(request.continuations):
            if ids:
                key = tuple(request.prompt_ids)
                prompt = prompts.setdefault(key, Prompt(key, []))
                prompt.continuations.append(Continuation(number, each, ids, request.top))
    return sorted(
        prompts.values(), key=lambda prompt: (-len(prompt.ids), -prompt.longest, prompt.continuations[0].request)
    )


def cut_batches(
    prompts: Sequence[Prompt], before: int, bytes_a_token: int, budget_bytes: int, max_rows: int
) -> Iterator[list[Prompt]]:
    """Prompts whose own tokens, behind a prefix of `before`, are one pass within the budget; or one long prompt."""
    batch: list[Prompt] = []
    tokens = longest = 0
    for prompt in prompts:
        own = len(prompt.ids) - before
        longest_now = max(longest, prompt.longest)
        widest = len(batch[0].ids) if batch else 0
        fits = (
            len(batch) < max_rows
            and tokens + own <= PASS_TOKENS
            and (len(batch) + 1) * widest <= PASS_KEYS
            and (len(batch) + 1) * (widest + longest_now) * bytes_a_token <= budget_bytes
        )
        if batch and not fits:
            yield batch
            batch, tokens, longest_now = [], 0, prompt.longest
        batch.append(prompt)
        tokens, longest = tokens + own, longest_now
    if batch:
        yield batch


def groups_of(batch: Sequence[Prompt]) -> Iterator[Group]:
    """Continuations of more than one token: so many to a copy of their prompt's keys that the copy costs little."""
    for number, prompt in enumerate(batch):
        most = min(max(len(prompt.ids), LEAST_GROUP), PASS_TOKENS)
        group = Group(number, [])
        for one in prompt.continuations:
            if len(one.ids) > 1:
                if group.continuations and group.tokens + len(one.ids) - 1 > most:
                    yield group
                    group = Group(number, [])
                group.continuations.append(one)
        if group.continuations:
            yield group


def cut_passes(groups: Iterable[Group], batch: Sequence[Prompt]) -> Iterator[list[Group]]:
    """Groups of similar size, largest first, whose tokens are one pass; or one long group."""
    current: list[Group] = []
    tokens, keys = 0, max(len(prompt.ids) for prompt in batch)
    for group in sorted(groups, key=lambda group: -group.tokens):
        if current:
            wide = (len(current) + 1) * (keys + current[0].tokens) > PASS_KEYS
            if wide or tokens + group.tokens > PASS_TOKENS:
                yield current
                current, tokens = [], 0
        current.append(group)
        tokens += group.tokens
    if current:
        yield current
