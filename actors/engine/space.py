"""Cache space for requests that arrive one by one: how many fit now, and the cache they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.engine.engine import Engine
from actors.engine.protocol import EngineProtocol
from actors.engine.schedules.schedule import Schedule, envelope
from actors.engine.types import Request

Shape = tuple[int, int, Schedule]  # longest prompt, most new tokens, the deepest schedule at each position
LEAST_TOKENS = 64  # of a shape that is rounded up


class Space(Protocol):
    """The cache of an engine whose requests come one by one."""

    def bytes_alone(self, request: Request, limit: int) -> int:
        """Cache bytes of a request with nothing else in flight. limit: its most new tokens."""
        ...

    def fit(self, waiting: Sequence[Request], most_rows: int) -> int:
        """Make cache for the first waiting requests, as many as fit; returns their number.

        most_rows: limit of all rows in flight, the new ones included.
        """
        ...

    def closed(self) -> None:
        """The engine has been closed."""
        ...


def space_of(engine: EngineProtocol, budget_bytes: int, max_rows: int) -> Space:
    """The space of an engine: slots of one shape, or pages."""
    if isinstance(engine, Engine):
        return Slots(engine, budget_bytes)
    assert engine.grows
    return Pages(engine, max_rows)


class Slots:
    """All slots are as long as the longest row in flight needs; the cache is resized as rows come and go.

    Rows times bytes of the longest row never exceed the budget. A request that is longer than the others waits until
    few enough rows are in flight. Requests behind it wait too, so that no request waits for ever.
    """

    def __init__(self, engine: Engine, budget_bytes: int) -> None:
        self.engine, self.budget_bytes = engine, budget_bytes
        self._shape: Shape | None = None

    def bytes_alone(self, request: Request, limit: int) -> int:
        return self.engine.row_bytes(len(request.prompt_ids), limit, request.schedule)

    def closed(self) -> None:
        self._shape = None

    def fit(self, waiting: Sequence[Request], most_rows: int) -> int:
        engine = self.engine
        held = len(engine.rows)
        prompt = max((len(row.request.prompt_ids) for row in engine.rows), default=1)
        most_new = max((row.limit for row in engine.rows), default=1)
        schedules = {id(row.schedule): row.schedule for row in engine.rows}
        count, shape = 0, None
        for request in waiting[: most_rows - held]:
            prompt = max(prompt, len(request.prompt_ids))
            most_new = max(most_new, request.new_tokens_limit(engine.decoder.context_length))
            schedule = request.schedule or engine.schedule
            schedules[id(schedule)] = schedule
            deepest = envelope(schedules.values())
            if (held + count + 1) * engine.row_bytes(prompt, most_new, deepest) > self.budget_bytes:
                break
            count, shape = count + 1, (prompt, most_new, deepest)
        if shape is not None:
            self._make_ready(shape, held + count, held + len(waiting), most_rows)
        return count

    def _make_ready(self, shape: Shape, rows: int, wanted: int, most_rows: int) -> None:
        """Open or resize the cache if it is too small. rows: in flight from now on; wanted: with those that wait."""
        engine, now = self.engine, self._shape
        if now is not None and engine.cache is not None and engine.cache.capacity >= rows and _covers(now, shape):
            return
        context = engine.decoder.context_length
        rounded = (_rounded(shape[0], context), _rounded(shape[1], context), shape[2])
        if self._capacity(rounded, most_rows) >= min(most_rows, wanted):  # else no token of the budget is given away
            shape = rounded
        capacity = self._capacity(shape, most_rows)
        if engine.rows:
            engine.resize(capacity, *shape)
        else:
            engine.open(capacity, *shape)
        self._shape = shape

    def _capacity(self, shape: Shape, most_rows: int) -> int:
        size = self.engine.row_bytes(*shape)
        return min(most_rows, self.budget_bytes // size) if size else most_rows


def _covers(shape: Shape, needed: Shape) -> bool:
    """Whether a cache of one shape holds rows of another."""
    return shape[0] >= needed[0] and shape[1] >= needed[1] and shape[2].covers(needed[2])


def _rounded(tokens: int, context: int) -> int:
    """A power of two, so that the cache is seldom resized; at most the context."""
    size = LEAST_TOKENS
    while size < tokens:
        size *= 2
    return max(tokens, min(size, context))


class Pages:
    """Rows allocate pages as they grow: opened once, for rows as long as the context."""

    def __init__(self, engine: EngineProtocol, max_rows: int) -> None:
        self.engine, self.max_rows = engine, max_rows
        self._open = False

    def bytes_alone(self, request: Request, limit: int) -> int:
        return self.engine.row_bytes(len(request.prompt_ids), limit)

    def closed(self) -> None:
        self._open = False

    def fit(self, waiting: Sequence[Request], most_rows: int) -> int:
        engine = self.engine
        if not self._open:
            context = engine.decoder.context_length
            engine.open(self.max_rows, context, context)
            self._open = True
        return min(len(waiting), engine.admission_estimate(waiting))
