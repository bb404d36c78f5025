"""The coordinator of a run: counts what is committed, knows what is at work, stops the run. Imports no ray."""

from __future__ import annotations

from typing import Protocol

Counts = tuple[int, int, int, int]  # shards, rows, errors, generated tokens


class RunCoordinator(Protocol):
    """What stages ask and report: a `Coordinator`, or a handle to the one in another process."""

    def loading(self, actor: str | None) -> int:
        """An actor begins to load its model; returns how many loads it began since the last complete one."""
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
        """Shards at work."""
        ...

    def read(self) -> Counts:
        """Committed in this run."""
        ...


class Coordinator:
    """Shards at work, shards committed and models being loaded in one run.

    The generate stage begins a shard, the commit stage ends it, the driver reads and may stop the run.
    """

    def __init__(self) -> None:
        self.counts: Counts = (0, 0, 0, 0)
        self.at_work: set[int] = set()
        self.stopped = False
        self.loads: dict[str | None, int] = {}

    def loading(self, actor: str | None) -> int:
        """See `RunCoordinator`, also for the methods below."""
        self.loads[actor] = self.loads.get(actor, 0) + 1
        return self.loads[actor]

    def loaded(self, actor: str | None) -> None:
        self.loads.pop(actor, None)

    def begin(self, shard: int) -> bool:
        if self.stopped:
            self.at_work.discard(shard)  # its first attempt has died
        else:
            self.at_work.add(shard)
        return not self.stopped

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int) -> None:
        self.at_work.discard(shard)
        if first:
            shards, all_rows, all_errors, all_tokens = self.counts
            self.counts = (shards + 1, all_rows + rows, all_errors + errors, all_tokens + tokens)

    def stop(self) -> set[int]:
        self.stopped = True
        return self.at_work

    def working(self) -> set[int]:
        return self.at_work

    def read(self) -> Counts:
        return self.counts
