"""The coordinator of a run: counts what is committed, knows what is at work, stops the run. Imports no ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

MOST_SPANS = 512  # shards whose times are kept


@dataclass(frozen=True)
class RunProgress:
    """Committed in this run; actors that load their model, the last line of a download; shards at work.

    Args:
        elapsed: s since each of the shards at work began.
        recent: the latest committed shards, at most half of all: their number.
        row_seconds: of these, s from begin to commit, by the row.
        at_once: mean number of shards at work since the first of these began.
    """

    shards: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    loading: int = 0
    download: str = ""
    elapsed: tuple[float, ...] = ()
    recent: int = 0
    row_seconds: float = 0.0
    at_once: float = 0.0

    @property
    def at_work(self) -> int:
        """How many shards are at work."""
        return len(self.elapsed)


@dataclass(frozen=True)
class Workload:
    """Shards and rows of the job, and of them those that earlier runs have committed.

    began: s since 1970, when the command began; default now.
    """

    shards: int
    rows: int
    done_shards: int
    done_rows: int
    began: float = field(default_factory=time.time)


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

    def begin(self, shard: int) -> bool:
        """An actor is about to answer this shard; False: it must not, the run is being stopped."""
        ...

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int) -> None:
        """A shard is committed; first: by this attempt, and these are its numbers."""
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
        self.at_work: dict[int, float] = {}  # when they began
        self.spans: deque[tuple[float, float, int]] = deque(maxlen=MOST_SPANS)  # begin, commit and rows of shards
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

    def begin(self, shard: int) -> bool:
        if self.stopped:
            self.at_work.pop(shard, None)  # its first attempt has died
        else:
            self.at_work[shard] = self.clock()
        return not self.stopped

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int) -> None:
        began = self.at_work.pop(shard, None)
        if began is not None:
            self.spans.append((began, self.clock(), rows))
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
        run = replace(
            self.committed,
            loading=len(self.loads),
            download=next(iter(self.downloads.values()), ""),
            elapsed=tuple(now - began for began in self.at_work.values()),
        )
        if not self.spans:
            return run
        # the first shards wait for the second actor, for kernels and for prompts: the latest tell more of the next ones
        latest = list(self.spans)[len(self.spans) // 2 :]
        since = min(began for began, *_ in latest)
        spans = [
            *((began, ended) for began, ended, _ in self.spans),
            *((began, now) for began in self.at_work.values()),
        ]
        return replace(
            run,
            recent=len(latest),
            row_seconds=sum(ended - began for began, ended, _ in latest) / max(1, sum(rows for *_, rows in latest)),
            at_once=sum(max(0.0, ended - max(began, since)) for began, ended in spans) / max(now - since, 1e-9),
        )
