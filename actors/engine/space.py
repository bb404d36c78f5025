"""Slots for requests that arrive one by one: how many fit now, and the cache that holds them."""

from __future__ import annotations

from collections.abc import Sequence

from actors.engine.engine import Engine
from actors.engine.schedules.schedule import Schedule, envelope
from actors.engine.types import Request

Shape = tuple[int, int, Schedule]  # longest prompt, most new tokens, the deepest schedule at each position
MIN_TOKENS = 64  # of a shape that is rounded up


class Slots:
    """Slots as long as the longest row in flight needs; the cache is resized as rows come and go.

    Rows times bytes of the longest row never exceed the budget. A request that is longer than the others waits until
    few enough rows are in flight. Requests behind it wait too, so that no request waits for ever.
    """

    def __init__(self, engine: Engine, budget_bytes: int) -> None:
        self.engine, self.budget_bytes = engine, budget_bytes
        self._shape: Shape | None = None

    def bytes_alone(self, request: Request) -> int:
        """Return the cache bytes of a request with nothing else in flight."""
        limit = request.new_tokens_limit(self.engine.decoder.context_length)
        return self.engine.row_bytes(len(request.prompt_ids), limit, request.schedule)

    def closed(self) -> None:
        """Note that the engine has been closed."""
        self._shape = None

    def fit(self, waiting: Sequence[Request], max_rows: int) -> int:
        """Make slots for the first waiting requests, as many as fit; return their number.

        max_rows: Limit of all rows in flight, the new ones included.
        """
        engine = self.engine
        held = len(engine.rows)
        prompt = max((len(row.request.prompt_ids) for row in engine.rows), default=1)
        most_new = max((row.limit for row in engine.rows), default=1)
        schedules = {id(row.schedule): row.schedule for row in engine.rows}
        count, shape = 0, None
        for request in waiting[: max_rows - held]:
            prompt = max(prompt, len(request.prompt_ids))
            most_new = max(most_new, request.new_tokens_limit(engine.decoder.context_length))
            schedule = request.schedule or engine.schedule
            schedules[id(schedule)] = schedule
            deepest = envelope(schedules.values())
            if (held + count + 1) * engine.row_bytes(prompt, most_new, deepest) > self.budget_bytes:
                break
            count, shape = count + 1, (prompt, most_new, deepest)
        if shape is not None:
            self._make_ready(shape, held + count, held + len(waiting), max_rows)
        return count

    def _make_ready(self, shape: Shape, rows: int, wanted: int, max_rows: int) -> None:
        """Open or resize the cache if it is too small.

        Args:
            shape: The shape of the rows in flight from now on.
            rows: Number of rows in flight from now on.
            wanted: Their number with those that wait.
            max_rows: Their largest number.
        """
        engine, now = self.engine, self._shape
        if now is not None and engine.cache is not None and engine.cache.capacity >= rows and _covers(now, shape):
            return
        context = engine.decoder.context_length
        rounded = (_rounded(shape[0], context), _rounded(shape[1], context), shape[2])
        if self._capacity(rounded, max_rows) >= min(max_rows, wanted):  # else rounding would cost rows
            shape = rounded
        capacity = self._capacity(shape, max_rows)
        if engine.rows:
            engine.resize(capacity, *shape)
        else:
            engine.open(capacity, *shape)
        self._shape = shape

    def _capacity(self, shape: Shape, max_rows: int) -> int:
        size = self.engine.row_bytes(*shape)
        return min(max_rows, self.budget_bytes // size) if size else max_rows


def _covers(shape: Shape, needed: Shape) -> bool:
    """Return whether a cache of one shape holds rows of another."""
    return shape[0] >= needed[0] and shape[1] >= needed[1] and shape[2].covers(needed[2])


def _rounded(tokens: int, context: int) -> int:
    """Return a power of two, so that the cache is seldom resized, but at most the context."""
    return max(tokens, min(max(MIN_TOKENS, 1 << (tokens - 1).bit_length()), context))
