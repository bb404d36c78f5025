"""The time until a run's command ends: one estimate, which progress line, log events and metric show.

    seconds of a shard = row_seconds · rows + token_seconds · tokens of its prompts
    time left          = the shards, each given to the actor that is free first, + ENDING_SECONDS

Both rates are those of the latest shards; `plan` counts as one shard. Imports no ray.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ENDING_SECONDS = 1.2  # from the last commit to the end of the command: statistics, report, leaving Ray, the process
MOST_TURNS = 2000  # shards that are given to actors one by one; of more, the others count by the mean


@dataclass(frozen=True)
class Size:
    """Rows of a shard, and tokens of their prompts behind the job's prefix."""

    rows: float
    tokens: float


@dataclass(frozen=True)
class ShardAtWork:
    """A shard that an actor answers. elapsed: s since it began. size: None if it is not known."""

    elapsed: float
    size: Size | None = None


@dataclass(frozen=True)
class Span:
    """A committed shard: its actor, when it began and when it was committed in s, and of that the s of prefill."""

    actor: str | None
    began: float
    ended: float
    size: Size
    prefill_seconds: float = 0.0


@dataclass(frozen=True)
class Pace:
    """What the latest committed shards took.

    Args:
        shards: their number.
        row_seconds: s from begin to commit, by the row, without prefill.
        token_seconds: s of prefill, by the token of a prompt.
        row_tokens: tokens of a prompt.
        actors: that work, or will.
        busy: shards that an actor had at the same time, on average: below 1 it has waited for prompts.
    """

    shards: int
    row_seconds: float
    token_seconds: float
    row_tokens: float
    actors: int
    busy: float

    def seconds(self, size: Size) -> float:
        """From begin to commit of a shard."""
        return self.row_seconds * size.rows + self.token_seconds * size.tokens


@dataclass(frozen=True)
class Planned:
    """What `plan` has predicted: s until the first shard begins, and from then to the last commit.

    It counts as one measured shard: the first ones are few, and may be slow.
    """

    startup: float
    work: float

    def seconds_left(self, seconds: float, working_seconds: float) -> float:
        """Until the command ends.

        Args:
            seconds: since the command began.
            working_seconds: since the first shard began; 0 before.
        """
        startup = 0.0 if working_seconds else max(0.0, self.startup - seconds)
        return startup + max(0.0, self.work - working_seconds) + ENDING_SECONDS

    def blended(self, measured: float, shards: int, working_seconds: float) -> float:
        """The time left, where it is `measured` by so many shards."""
        return (measured * shards + self.seconds_left(0.0, working_seconds)) / (shards + 1)


def pace_of(spans: Sequence[Span], at_work: Mapping[int, tuple[str | None, float]], now: float) -> Pace | None:
    """None before the first commit.

    Args:
        spans: committed shards in the order of their commits.
        at_work: of each shard its actor and when it began.
        now: on the same clock.
    """
    if not spans:
        return None
    # the first shards wait for kernels and for prompts: the latest tell more of the next ones
    latest = spans[len(spans) // 2 :]
    since = min(span.began for span in latest)
    working = {span.actor for span in latest} | {actor for actor, _ in at_work.values()}
    times = [(one.actor, one.began, one.ended) for one in spans if one.actor in working]
    times += [(actor, began, now) for actor, began in at_work.values()]
    first, last = dict.fromkeys(working, now), dict.fromkeys(working, since)
    for actor, began, ended in times:
        first[actor], last[actor] = min(first[actor], began), max(last[actor], ended)
    # an actor whose last shard is committed may have no other to come, and does not count as waiting
    present = sum(last[actor] - max(since, first[actor]) for actor in working)
    worked = sum(max(0.0, ended - max(began, since)) for _, began, ended in times)
    rows, tokens = sum(span.size.rows for span in latest), sum(span.size.tokens for span in latest)
    seconds = sum(span.ended - span.began for span in latest)
    prefill = min(seconds, sum(span.prefill_seconds for span in latest)) if tokens else 0.0
    return Pace(
        shards=len(latest),
        row_seconds=(seconds - prefill) / max(rows, 1),
        token_seconds=prefill / max(tokens, 1),
        row_tokens=tokens / max(rows, 1),
        actors=len(working),
        busy=worked / present if present > 0 else 1.0,
    )


def seconds_left(
    pace: Pace, at_work: Sequence[ShardAtWork], waiting: Sequence[Size], shards: int, rows: float, loading: int = 0
) -> float:
    """Until the command ends.

    Args:
        at_work: shards that have begun.
        waiting: known sizes of shards that will begin next.
        shards, rows: that are not committed, these included.
        loading: actors that still load their model.
    """
    waiting = waiting[: max(0, shards - len(at_work))]
    sizes = [one.size for one in at_work if one.size is not None] + list(waiting)
    other = _mean_rest(pace, sizes, shards, rows)
    usual = [pace.seconds(one.size or other) for one in at_work]
    # of a shard that takes longer than usual the end is not known: at least so long
    late = [one.elapsed / seconds for one, seconds in zip(at_work, usual, strict=True) if one.elapsed > seconds > 0]
    scale = (pace.shards + sum(late)) / (pace.shards + len(late)) / max(pace.busy, 1e-9)
    actors = max(1, pace.actors + loading)
    rest = [max(0.0, scale * seconds - one.elapsed) for one, seconds in zip(at_work, usual, strict=True)]
    free = [*sorted(rest, reverse=True)[:actors], *[0.0] * (actors - len(rest))]
    unknown = shards - len(at_work) - len(waiting)
    turns = min(unknown, MOST_TURNS)
    known = (scale * pace.seconds(size) for size in waiting)
    end = makespan([*known, *[scale * pace.seconds(other)] * turns], free)
    return end + scale * pace.seconds(other) * (unknown - turns) / actors + ENDING_SECONDS


def _mean_rest(pace: Pace, sizes: Sequence[Size], shards: int, rows: float) -> Size:
    """The mean size of the shards that have none in `sizes`; their prompts are as long as those of the others."""
    unknown = max(1, shards - len(sizes))
    mean_rows = max(0.0, rows - sum(size.rows for size in sizes)) / unknown
    return Size(mean_rows, mean_rows * pace.row_tokens)


def makespan(seconds: Iterable[float], free: Sequence[float]) -> float:
    """When the last shard ends, if each goes to the actor that is free first. free: when each actor is."""
    ends = list(free)
    heapq.heapify(ends)
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)
