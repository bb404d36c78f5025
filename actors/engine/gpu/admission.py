"""How many waiting rows the pages have space for: an estimate, since rows grow and end when they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.engine.gpu.pages import row_pages, shared_tokens
from actors.engine.row import Row
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Request

FEW_ENDED = 16  # rows; the average length of fewer is no estimate


class AdmissionEstimate:
    """Estimates with the average length of the rows that have ended since `reset`.

    Args:
        schedule: Layers of each position.
        context_length: Tokens of the model's context.
        read_every: Steps between completion polls, for which rows allocate pages ahead.
    """

    def __init__(self, schedule: Schedule, context_length: int, read_every: int) -> None:
        self.schedule, self.context_length, self.read_every = schedule, context_length, read_every
        self.ended_rows = self._ended_tokens = 0
        self._estimate: int | None = None

    def reset(self) -> None:
        """Forget the rows that have ended."""
        self.ended_rows = self._ended_tokens = 0
        self._estimate = None

    def add_ended(self, rows: Sequence[Row]) -> None:
        """Count rows that have ended."""
        self.ended_rows += len(rows)
        self._ended_tokens += sum(len(row.tokens) for row in rows)

    def changed(self) -> None:
        """Rows have come or gone: the next call computes a new estimate."""
        self._estimate = None

    def row_pages(self, prompt_tokens: int, new_tokens: int) -> int:
        """Most pages of such a row, with those that it allocates until the host has seen it end."""
        return row_pages(self.schedule, prompt_tokens, new_tokens + 2 * self.read_every, self.read_every)

    def admissible(
        self,
        requests: Sequence[Request],
        prefixes: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        held: Callable[[Row], tuple[int, int]],
        missing: Callable[[tuple[int, ...]], int],
        free: int,
    ) -> int:
        """How many of these requests, in their order, find pages while the rows in flight grow to the average length,
        or to their limit while few have ended.

        Args:
            requests: The waiting rows.
            prefixes: Of each request, the prefix whose pages it shares.
            rows: Rows in flight.
            held: Pages of a row in flight, see `PagedCache.held_by`.
            missing: Pages to allocate for a prefix.
            free: Free pages.
        """
        if self._estimate is None:
            self._estimate = self._compute(requests, prefixes, rows, held, missing, free)
        return self._estimate

    def _compute(
        self,
        requests: Sequence[Request],
        prefixes: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        held: Callable[[Row], tuple[int, int]],
        missing: Callable[[tuple[int, ...]], int],
        free: int,
    ) -> int:
        few = self.ended_rows < FEW_ENDED
        mean = 0 if few else -(-self._ended_tokens // self.ended_rows)

        def expected(request: Request, limit: int, tokens: int, shared: int) -> int:
            new = limit if few else min(limit, max(mean, tokens + self.read_every))
            return self.row_pages(len(request.prompt_ids) - shared, new)

        for row in rows:
            own, shared = held(row)
            free -= max(0, expected(row.request, row.limit, row.position + 1, shared) - own)
        counted: set[tuple[int, ...]] = set()
        last: tuple[int, ...] | None = None
        for count, (request, prefix) in enumerate(zip(requests, prefixes, strict=True)):
            if prefix is not last and prefix not in counted:  # rows that share one have the same object
                counted.add(prefix)
                free -= missing(prefix)
            last = prefix
            limit = request.new_tokens_limit(self.context_length)
            free -= expected(request, limit, 0, shared_tokens(len(prefix)))
            if free < 0:
                return count
        return len(requests)
