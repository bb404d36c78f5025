"""A job's batches without its model: the engine's own scheduler over rows whose answers' lengths are given.

`SimulatedEngine` stands behind `EngineProtocol`; every pass and step adds its predicted seconds. So batches, refill
and rows that wait for a longer one are those of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from actors.engine.cache import cache_bytes_per_row
from actors.engine.gpu.pages import shared_tokens
from actors.engine.protocol import Ended
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Completion, EngineStats, FinishReason
from actors.engine.working_memory import CHUNK_TOKENS, PREFIX_TOKENS
from pipeline.estimate.costs import Costs, KeptPrefix, pass_terms, step_terms

DONE = Completion((), FinishReason.STOP, None)


@dataclass(frozen=True)
class SimulatedRow:
    """A request as the scheduler sees it.

    Args:
        prompt_ids: its prompt.
        limit: most new tokens.
        tokens: of its answer.
        source: equal for the samples of one prompt, which one pass computes.
    """

    prompt_ids: Sequence[int]
    limit: int
    tokens: int
    source: int

    def new_tokens_limit(self, context_length: int) -> int:
        """As of `Request`."""
        return self.limit


@dataclass(frozen=True)
class EngineShape:
    """What the scheduler asks of an engine.

    Args:
        token_bytes: of cache, of a token in one layer.
        context: tokens, at most.
        grows: whether the cache is paged.
        cache_bytes, max_rows, scheduler, prefix: of the job's batching.
        share_prefixes: the job's `shared_prefix`.
    """

    token_bytes: int
    context: int
    grows: bool
    cache_bytes: int
    max_rows: int
    scheduler: str
    prefix: tuple[int, ...]
    share_prefixes: bool = True


@dataclass
class _Flying:
    ticket: int
    row: SimulatedRow
    prefix: tuple[int, ...]
    made: int = 1  # tokens, the first comes from the prompts' pass


@dataclass
class Simulated:
    """Totals of simulated rows. row_steps: tokens that were an input to decode; layer_steps: layers run over them."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    batches: int = 0
    cache_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    row_steps: int = 0
    layer_steps: int = 0

    @property
    def seconds(self) -> float:
        """Of the engine."""
        return self.prefill_seconds + self.decode_seconds


class SimulatedEngine:
    """An engine that answers rows with nothing and counts seconds."""

    cumulative_logprob = False
    rounds_to_warm = 0

    def __init__(self, schedule: Schedule, costs: Costs, shape: EngineShape) -> None:
        self.schedule, self.costs, self.shape = schedule, costs, shape
        self.decoder = SimpleNamespace(context_length=shape.context)
        self.stats = EngineStats()
        self.grows, self.stepped, self.token_bytes = shape.grows, False, shape.token_bytes
        self.rows: list[_Flying] = []
        self.totals = Simulated()
        self._tickets = 0
        self._prefix = KeptPrefix()
        self._known: dict[tuple[int, int], int] = {}

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """See `EngineProtocol`."""
        key = (prompt_tokens, max_new_tokens)
        if key not in self._known:
            self._known[key] = cache_bytes_per_row(self.schedule, *key, self.token_bytes)
        return self._known[key]

    def shared_tokens(self, prefix: Sequence[int]) -> int:
        """See `EngineProtocol`."""
        return shared_tokens(min(len(prefix), PREFIX_TOKENS)) if self.grows else 0

    def open(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """See `EngineProtocol`."""
        self.totals.batches += 1
        size = min(rows * self.row_bytes(prompt_tokens, max_new_tokens), self.shape.cache_bytes)
        self.totals.cache_bytes = max(self.totals.cache_bytes, size)

    def widen(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> bool:
        """See `EngineProtocol`; memory is the budget."""
        self.totals.batches += 1
        size = rows * self.row_bytes(prompt_tokens, max_new_tokens)
        self.totals.cache_bytes = max(self.totals.cache_bytes, min(size, self.shape.cache_bytes))
        return self.grows or size <= self.shape.cache_bytes

    def admit(self, requests: Sequence[SimulatedRow], prefix: Sequence[int] = ()) -> list[int]:
        """See `EngineProtocol`."""
        prompts = {row.source: len(row.prompt_ids) for row in requests}
        new = self._prefix.is_new(prefix)
        terms = pass_terms(self.schedule, list(prompts.values()), len(prefix), len(requests), new_prefix=new)
        self.totals.prefill_seconds += self.costs.prefill_seconds(terms)
        self.totals.prompt_tokens += sum(prompts.values())
        self.stepped = self.grows and bool(self.rows) and all(row.made > 1 for row in self.rows)
        if self.stepped:
            self._step(rides=True)
        begun = [_Flying(self._tickets + index, row, tuple(prefix)) for index, row in enumerate(requests)]
        self._tickets += len(begun)
        self.rows += begun
        return [row.ticket for row in begun]

    def step(self, *, last: bool = False) -> Ended:
        """See `EngineProtocol`."""
        ended = self.retire()
        if self.rows:
            self._step(rides=False)
            ended += self.retire()
        return ended

    def _step(self, *, rides: bool) -> None:
        """A token for every row. rides: within a prefill pass, which has read the weights."""
        made = np.array([row.made for row in self.rows], float)
        contexts = made + np.array([len(row.row.prompt_ids) for row in self.rows], float)
        terms = step_terms(self.schedule, made - 1, contexts)
        self.totals.row_steps += len(self.rows)
        self.totals.layer_steps += int(terms[3])
        if rides:
            terms[0] = terms[2] = 0.0
        self.totals.decode_seconds += self.costs.decode_seconds(terms)
        for row in self.rows:
            row.made += 1

    def retire(self) -> Ended:
        """See `EngineProtocol`."""
        ended = [row for row in self.rows if row.made >= row.row.tokens]
        if ended:
            self.rows = [row for row in self.rows if row.made < row.row.tokens]
            self.totals.generated_tokens += sum(row.row.tokens for row in ended)
        return [(row.ticket, DONE) for row in ended]

    def close(self) -> None:
        """See `EngineProtocol`."""
        self.rows = []

    def admission_estimate(self, requests: Sequence[SimulatedRow], prefixes: Sequence[Sequence[int]]) -> int:
        """See `EngineProtocol`."""
        if not self.grows:
            return len(requests)
        shared: set[int] = set()
        held = sum(self._own_bytes(row.row, row.prefix, shared) for row in self.rows)
        for count, (row, prefix) in enumerate(zip(requests, prefixes, strict=True)):
            held += self._own_bytes(row, tuple(prefix), shared)
            if held > self.shape.cache_bytes:
                return count
        return len(requests)

    def _own_bytes(self, row: SimulatedRow, prefix: tuple[int, ...], shared: set[int]) -> int:
        """Bytes of a row's pages, without those of its prefix if that is one of `shared`, which it is from then on.

        shared: `id` of prefixes: rows of a group have the same object, and comparing its tokens takes long.
        """
        tokens = len(row.prompt_ids)
        if id(prefix) in shared:
            tokens -= self.shared_tokens(prefix)
        shared.add(id(prefix))
        return self.row_bytes(tokens, row.tokens)

    def first_pass(self, requests: Sequence[SimulatedRow], prefix: Sequence[int]) -> int:
        """See `EngineProtocol`."""
        if not self.grows:
            return len(requests)
        tokens = 0
        for count, row in enumerate(requests):
            tokens += len(row.prompt_ids) - len(prefix)
            if count and tokens > CHUNK_TOKENS:
                return count
        return len(requests)

    def take_preempted(self) -> list[int]:
        """See `EngineProtocol`."""
        return []

    def release_memory(self) -> bool:
        """See `EngineProtocol`."""
        return False


def simulate(rows: Sequence[SimulatedRow], schedule: Schedule, costs: Costs, shape: EngineShape) -> Simulated:
    """Answer the rows of a shard, as one actor would."""
    engine = SimulatedEngine(schedule, costs, shape)
    generate(
        cast(Any, engine),
        cast(Any, rows),
        budget_bytes=shape.cache_bytes,
        max_rows=shape.max_rows,
        prefix=shape.prefix,
        share_prefixes=shape.share_prefixes,
        scheduler=shape.scheduler,
    )
    return engine.totals
