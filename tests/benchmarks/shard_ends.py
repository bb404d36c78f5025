"""How many slots are idle where shards end, with and without rows of the next shard in them: the scheduler itself, over
an engine that only counts.

    .venv/bin/python tests/benchmarks/shard_ends.py [--shards 12]

Answers lognormal (median 300, sigma 0.7, at most 1,536), one token a step, refill. No clock is read: slots are idle in
steps in which they hold no row. Refill admits rows in groups, so that some are idle always: the loss at shard ends is
what is idle beyond one shard of all rows before its end. Where calls join, the end of the last shard, which nothing can
fill, is left out. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from actors.engine.engine import Ended
from actors.engine.loop import Call, Loop
from actors.engine.types import Completion, EngineStats, FinishReason, Request, SamplingParams

MOST_NEW = 1536
DONE = Completion((), FinishReason.STOP, None)


class CountingEngine:
    """Rows that end after as many steps as their key says."""

    cumulative_logprob = False

    def __init__(self) -> None:
        self.decoder = SimpleNamespace(context_length=2**20)
        self.executor = SimpleNamespace(reserved_bytes=0)
        self.schedule = SimpleNamespace(num_layers=1, layer_steps=int)
        self.stats = EngineStats()
        self.rows: list[Any] = []
        self.steps: list[int] = []  # rows of each
        self._tickets = 0

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int, schedule: Any = None) -> int:
        """See `Engine`, also for the methods below."""
        return prompt_tokens + max_new_tokens

    def open(self, *shape: Any) -> None:
        pass

    def widen(self, *shape: Any, **kinds: Any) -> bool:
        return True

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        first, self._tickets = self._tickets, self._tickets + len(requests)
        self.rows += [SimpleNamespace(ticket=first + place, left=one.key - 1) for place, one in enumerate(requests)]
        return list(range(first, self._tickets))

    def step(self, *, last: bool = False) -> Ended:
        self.steps.append(len(self.rows))
        for row in self.rows:
            row.left -= 1
        return self.retire()

    def retire(self) -> Ended:
        ended = [row for row in self.rows if row.left <= 0]
        self.rows = [row for row in self.rows if row.left > 0]
        return [(row.ticket, DONE) for row in ended]

    def close(self) -> None:
        pass


def idle(shards: int, shard_rows: int, slots: int, *, joins: bool) -> tuple[float, int]:
    """Share of slots that were idle, and the steps of all shards. joins: until the last shard's rows were admitted."""
    chance = random.Random(7)
    rows = [
        [
            Request([3] * 512, SamplingParams(max_new_tokens=MOST_NEW), length)
            for length in (min(MOST_NEW, max(1, round(300 * chance.lognormvariate(0, 0.7)))) for _ in range(shard_rows))
        ]
        for _ in range(shards)
    ]
    engine = CountingEngine()
    scheduler = Loop(
        cast(Any, engine),
        budget_bytes=2**40,
        max_rows=slots,
        share_prefixes=False,
        scheduler="refill",
        joins_calls=joins,
    )
    calls: list[Call] = []
    drained = 0  # steps until then

    def submit() -> None:
        nonlocal drained
        drained = len(engine.steps)
        if len(calls) < shards:
            calls.append(scheduler.add(rows[len(calls)], on_drain=submit))

    submit()
    for number in range(shards):
        if number == len(calls):
            submit()
        scheduler.finish(calls[number])
    steps = engine.steps[: drained if joins else None]
    return 1 - sum(steps) / (slots * len(steps)), len(engine.steps)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=12)
    shards = parser.parse_args().shards
    found = {}
    for shard_rows, slots in ((4096, 64), (4096, 512), (1024, 64), (1024, 512)):
        always, _ = idle(1, shards * shard_rows, slots, joins=True)
        for joins in (False, True):
            share, steps = idle(shards, shard_rows, slots, joins=joins)
            name = f"{shard_rows} rows, {slots} in flight, {'joined' if joins else 'apart'}"
            found[name] = {"loss at shard ends, %": round(100 * (share - always), 2), "steps": steps}
            print(f"{name}: {found[name]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
