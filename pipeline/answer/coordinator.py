"""The coordinator of a run: counts committed shards, tracks running shards, and can stop the run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline.messages import shortened

SHOWN_KINDS = 3  # maximum number of kinds of errors to show
KIND_CHARS = 60  # characters shown of a kind of errors; kinds that differ only after them count as one


@dataclass(frozen=True)
class RunProgress:
    """Counts of what this run has committed so far, and the state of its actors."""

    shards: int = 0
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    loading: int = 0  # number of actors that are loading their model
    at_work: int = 0  # shards that have begun and are not yet committed
    actors: int = 0  # number of actors that have loaded their model
    kinds: tuple[tuple[str, int], ...] = ()  # (kind of error, number of answers), most frequent first
    example: str = ""  # the latest prompt and answer that an actor has sent
    warnings: tuple[str, ...] = ()  # signs of bad answers in the shard that was committed first


@dataclass(frozen=True)
class Workload:
    """Numbers of shards and rows in the job. done_shards, done_rows: numbers that earlier runs have committed."""

    shards: int
    rows: int
    done_shards: int
    done_rows: int
    began: float = field(default_factory=time.time)  # start of the command, s since 1970


class Coordinator:
    """Collects reports of actors: shards begun, shards committed, models loaded. The driver may stop the run here."""

    def __init__(self) -> None:
        self.committed = RunProgress()
        self.at_work: set[int] = set()
        self.done: set[int] = set()
        self.stopped = False
        self.loads: dict[str | None, int] = {}
        self.actors: set[str | None] = set()
        self.kinds = Counter[str]()
        self.example = ""
        self.warnings: tuple[str, ...] = ()

    def loading(self, actor: str | None) -> int:
        """Note that an actor begins to load its model. Return the number of its attempts since the last success."""
        self.loads[actor] = self.loads.get(actor, 0) + 1
        return self.loads[actor]

    def loaded(self, actor: str | None) -> None:
        """Note that an actor has loaded its model."""
        self.loads.pop(actor, None)
        self.actors.add(actor)

    def begin(self, shard: int) -> bool:
        """Return whether an actor may answer a shard: not if the run stops, or if the shard is committed already."""
        if self.stopped or shard in self.done:
            self.at_work.discard(shard)  # an earlier attempt that died may have added it
            return False
        self.at_work.add(shard)
        return True

    def show(self, example: str) -> None:
        """Store an answer that the driver may show."""
        self.example = example

    def ended(
        self,
        shard: int,
        first: bool,
        rows: int,
        errors: int,
        tokens: int,
        kinds: str = "",
        warnings: Sequence[str] = (),
    ) -> None:
        """Note that a shard is committed. first: whether this attempt committed it. Other attempts' counts are dropped.

        kinds, warnings: `error_kinds` and `warnings` of the shard's `ShardStats`.
        """
        self.done.add(shard)
        self.at_work.discard(shard)
        if first:
            done = self.committed
            if not done.shards:
                self.warnings = tuple(warnings)
            self.committed = RunProgress(done.shards + 1, done.rows + rows, done.errors + errors, done.tokens + tokens)
            for kind, answers, *_ in json.loads(kinds or "[]"):
                self.kinds[shortened(kind or "other", KIND_CHARS)] += answers

    def stop(self) -> set[int]:
        """Let no more shards begin. Return the shards that have begun and are not yet committed."""
        self.stopped = True
        return self.working()

    def working(self) -> set[int]:
        """Return the shards that have begun and are not yet committed."""
        return set(self.at_work)

    def read(self) -> RunProgress:
        """Return the progress of the run."""
        return replace(
            self.committed,
            loading=len(self.loads),
            at_work=len(self.at_work),
            actors=len(self.actors),
            kinds=tuple(self.kinds.most_common(SHOWN_KINDS)),
            example=self.example,
            warnings=self.warnings,
        )
