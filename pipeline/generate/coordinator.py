"""The coordinator of a run: counts what is committed, knows what is at work, stops the run. Imports no ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from pipeline.generate.time_left import Pace, Planned, ShardAtWork, Size, Span, pace_of

MOST_SPANS = 512  # shards whose times are kept
MOST_WAITING = 2000  # prepared shards whose sizes are read


@dataclass(frozen=True)
class RunProgress:
    """Committed in this run; actors that load their model, the last line of a download; shards at work.

    Args:
        at_work: shards that actors answer.
        waiting: sizes of prepared shards that have not begun, in their order.
        pace: of the latest committed shards.
    """

    shards: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    loading: int = 0
    download: str = ""
    at_work: tuple[ShardAtWork, ...] = ()
    waiting: tuple[Size, ...] = ()
    pace: Pace | None = None


@dataclass(frozen=True)
class Workload:
    """Shards and rows of the job, and of them those that earlier runs have committed.

    began: s since 1970, when the command began; default now. planned: of a run of these rows.
    """

    shards: int
    rows: int
    done_shards: int
    done_rows: int
    began: float = field(default_factory=time.time)
    planned: Planned | None = None


class RunCoordinator(Protocol):
    """What stages ask and report: a `Coordinator`, or a handle to the one in another process."""

    def loading(self, actor: str | None) -> int:
        """An actor begins to load its model; returns how many loads it began since the last complete one."""
        ...

    def downloading(self, actor: str | None, line: str) -> None:
        """An actor downloads its checkpoint; line: how far."""
        ...

    def loaded(self, actor: str | None) -> None:
        """An actor has loaded its model."""
        ...

    def prepared(self, shard: int, rows: int, tokens: int, prefix_tokens: int = 0) -> None:
        """A shard is prepared; tokens: of its prompts, which begin with the `prefix_tokens` of the job's prefix."""
        ...

    def begin(self, shard: int, actor: str | None = None) -> bool:
        """An actor is about to answer this shard; False: it must not, the run is being stopped."""
        ...

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int, prefill_seconds: float = 0.0) -> None:
        """A shard is committed; first: by this attempt, and these are its numbers. tokens: that were generated."""
        ...

    def stop(self) -> set[int]:
        """Begin no further shard; returns the shards at work."""
        ...

    def working(self) -> set[int]:
        """Return the indices of the shards that have begun and are not yet committed."""
        ...

    def read(self) -> RunProgress:
        """Progress of the run."""
        ...


class Coordinator:
    """Shards at work, shards committed and models being loaded in one run.

    The generate stage begins a shard, the commit stage ends it, the driver reads and may stop the run.

    clock: seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.committed = RunProgress()
        self.sizes: dict[int, Size] = {}  # of prepared shards that are not committed
        self.at_work: dict[int, tuple[str | None, float]] = {}  # their actors, and when they began
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.done: set[int] = set()
        self.stopped = False
        self.loads: dict[str | None, int] = {}
        self.downloads: dict[str | None, str] = {}

    def loading(self, actor: str | None) -> int:
        """See `RunCoordinator`, also for the methods below."""
        self.loads[actor] = self.loads.get(actor, 0) + 1
        return self.loads[actor]

    def downloading(self, actor: str | None, line: str) -> None:
        self.downloads[actor] = line

    def loaded(self, actor: str | None) -> None:
        self.downloads.pop(actor, None)
        self.loads.pop(actor, None)

    def prepared(self, shard: int, rows: int, tokens: int, prefix_tokens: int = 0) -> None:
        if shard not in self.done:
            self.sizes[shard] = Size(rows, max(0, tokens - rows * prefix_tokens))

    def begin(self, shard: int, actor: str | None = None) -> bool:
        if self.stopped:
            self.at_work.pop(shard, None)  # its first attempt has died
        else:
            self.at_work[shard] = (actor, self.clock())
        return not self.stopped

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int, prefill_seconds: float = 0.0) -> None:
        self.done.add(shard)
        size = self.sizes.pop(shard, Size(rows, 0))
        if shard in self.at_work:
            self.spans.append(Span(*self.at_work.pop(shard), self.clock(), size, prefill_seconds))
        if first:
            done = self.committed
            self.committed = RunProgress(done.shards + 1, done.rows + rows, done.errors + errors, done.tokens + tokens)

    def stop(self) -> set[int]:
        self.stopped = True
        return self.working()

    def working(self) -> set[int]:
        return set(self.at_work)

    def read(self) -> RunProgress:
        now = self.clock()
        waiting = (size for shard, size in sorted(self.sizes.items()) if shard not in self.at_work)
        return replace(
            self.committed,
            loading=len(self.loads),
            download=next(iter(self.downloads.values()), ""),
            at_work=tuple(
                ShardAtWork(now - began, self.sizes.get(shard)) for shard, (_, began) in self.at_work.items()
            ),
            waiting=tuple(islice(waiting, MOST_WAITING)),
            pace=pace_of(list(self.spans), self.at_work, now),
        )
