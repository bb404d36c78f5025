"""What the processes of one run tell each other: an actor on the driver's node. Imports no ray."""

from __future__ import annotations


class Coordinator:
    """A Ray actor: shards at work, shards committed and models being loaded in this run.

    The generate stage begins a shard, the commit stage ends it, the driver reads and may stop the run.
    """

    def __init__(self) -> None:
        self.counts = (0, 0, 0, 0)
        self.at_work: set[int] = set()
        self.stopped = False
        self.starts: dict[str | None, int] = {}

    def loading(self, actor: str | None) -> int:
        """An actor is about to load its model; returns how often it has begun to since it last had one."""
        self.starts[actor] = self.starts.get(actor, 0) + 1
        return self.starts[actor]

    def loaded(self, actor: str | None) -> None:
        """An actor has loaded its model."""
        self.starts.pop(actor, None)

    def begin(self, shard: int) -> bool:
        """An actor is about to answer this shard; False if it should not, because the run is being stopped."""
        if self.stopped:
            self.at_work.discard(shard)  # whose first attempt has died
        else:
            self.at_work.add(shard)
        return not self.stopped

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int) -> None:
        """A shard is committed; first: by this attempt, whose numbers these are."""
        self.at_work.discard(shard)
        if first:
            shards, all_rows, all_errors, all_tokens = self.counts
            self.counts = (shards + 1, all_rows + rows, all_errors + errors, all_tokens + tokens)

    def stop(self) -> set[int]:
        """No shard is begun from now on; returns those that are at work."""
        self.stopped = True
        return self.at_work

    def working(self) -> set[int]:
        """Shards at work."""
        return self.at_work

    def read(self) -> tuple[int, int, int, int]:
        """Shards, rows, errors and generated tokens so far."""
        return self.counts
