"""Decides which rows (requests) share the engine's cache slots, and which prefixes of prompts are computed only once.

All functions are pure: the same requests give the same batches. So a resumed job runs the same batches again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

SPREAD = 2  # maximum ratio of longest to shortest prompt in a run, because every slot is as long as the longest prompt
LEAST_TOKENS = 16  # minimum tokens in a shared prefix; sharing a shorter prefix costs more than it saves
LEAST_LONGER = 32  # a prefix of only some prompts must be this many tokens longer than a prefix that more prompts share
LEAST_SAVED = 256  # minimum prompt tokens that a shared prefix must save in a call: its separate prefill takes time
MOST_NESTED = 50  # maximum recursion depth of the search for shared prefixes
Prompt = tuple[int, ...]
# number of prompt tokens saved, and a list of (shared prefix, prompts that begin with it)
Saved = tuple[int, list[tuple[Prompt, Sequence[Prompt]]]]


@dataclass(frozen=True)
class Run:
    """Rows that share the slots allocated by one call of `Engine.open`."""

    rows: list[int]  # indices of the requests, in order of admission
    capacity: int  # maximum number of rows in flight


def plan_batches(
    prompt_tokens: Sequence[int],  # number of prompt tokens of each row
    max_new_tokens: Sequence[int],  # maximum number of new tokens of each row
    *,
    # (maximum prompt tokens, maximum new tokens) over the rows of a batch -> cache bytes per row
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,  # maximum cache bytes of a batch; every row alone must need at most this
    max_rows: int,  # maximum number of rows in a batch
    groups: Sequence[int] | None = None,  # number of the group to which each row belongs; None: one group
) -> list[list[int]]:
    """Divide rows into batches (lists of row indices). Long prompts come first, so that memory runs out early or never.

    Rows of a group stay next to each other. The group with the longest prompt comes first.
    """
    groups = groups or [0] * len(prompt_tokens)
    longest_of: dict[int, int] = {}
    for group, tokens in zip(groups, prompt_tokens, strict=True):
        longest_of[group] = max(tokens, longest_of.get(group, 0))
    order = sorted(
        range(len(prompt_tokens)),
        key=lambda row: (-longest_of[groups[row]], groups[row], -prompt_tokens[row], -max_new_tokens[row], row),
    )
    batches: list[list[int]] = []
    longest = most_new = 0
    for row in order:
        if batches:
            batch = batches[-1]
            long, new = max(longest, prompt_tokens[row]), max(most_new, max_new_tokens[row])
            if len(batch) < max_rows and (len(batch) + 1) * row_bytes(long, new) <= budget_bytes:
                batch.append(row)
                longest, most_new = long, new
                continue
        longest, most_new = prompt_tokens[row], max_new_tokens[row]
        assert row_bytes(longest, most_new) <= budget_bytes, "a row exceeds the budget even if it is alone"
        batches.append([row])
    return batches


def merge(
    runs: Sequence[Run],
    lengths: Sequence[int],
    limits: Sequence[int],
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
) -> list[Run]:
    """Join successive batches with prompts of similar length into longer runs, whose slots are refilled.

    `runs` are ordered by prompt length, longest first. Every slot of a run has room for the run's longest prompt and
    largest number of new tokens. Batches are not joined if that would more than halve the rows in flight.
    """
    merged: list[Run] = []
    most_new = 0
    for run in runs:
        new = max(limits[row] for row in run.rows)
        if merged:
            longest, most = max(lengths[row] for row in merged[-1].rows), max(new, most_new)
            capacity = max(merged[-1].capacity, run.capacity)
            slot = row_bytes(longest, most)
            fit = budget_bytes // slot if slot else capacity
            if longest <= SPREAD * max(lengths[row] for row in run.rows) and 2 * fit >= capacity:
                merged[-1].rows.extend(run.rows)
                merged[-1] = Run(merged[-1].rows, min(fit, capacity))
                most_new = most
                continue
        merged.append(Run(list(run.rows), run.capacity))
        most_new = new
    return merged


def smaller(run: Run) -> list[Run]:
    """Divide a run into runs with at most half as many rows in flight, or into single rows if only one is in flight."""
    if run.capacity == 1:
        return [replace(run, rows=[row]) for row in run.rows]
    if run.capacity >= len(run.rows):
        half = (len(run.rows) + 1) // 2
        halves = run.rows[:half], run.rows[half:]
        return [replace(run, rows=rows, capacity=len(rows)) for rows in halves if rows]
    return [replace(run, capacity=run.capacity // 2)]


def common_length(lists: Sequence[Sequence[int]]) -> int:
    """Return the length of the prefix that all `lists` share."""
    ordered = [list(one) for one in lists]
    least, greatest = min(ordered), max(ordered)  # no two lists have a shorter common prefix than these two
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def shared_prefixes(prompts: Sequence[Sequence[int]], among: Sequence[Sequence[int]] = ()) -> list[Prompt]:
    """Return for each prompt the prefix that it shares with other prompts, computed only once; () if there is none.

    Every prompt is at least one token longer than its prefix. Prompts share one prefix, or are divided into groups with
    longer prefixes, whichever saves more tokens.

    Args:
        prompts: Token ids of each prompt.
        among: Prompts to search for shared prefixes; default: `prompts`. A part of a shard then has the prefixes of the
            whole shard, and so the same rounding.
    """
    _, found = _best(sorted({tuple(prompt) for prompt in among or prompts}), LEAST_TOKENS, 0)
    chosen = {prompt: common for common, members in found for prompt in members}
    return [chosen.get(tuple(prompt), ()) for prompt in prompts]


def _whole(members: Sequence[Prompt], length: int, least: int) -> Saved:
    """Return the tokens saved if `members` share their first `length` tokens, which must be at least `least`."""
    saved = (len(members) - 1) * length
    if length < least or saved < LEAST_SAVED:
        return 0, []
    return saved, [(members[0][:length], members)]


def _best(ordered: Sequence[Prompt], least: int, level: int) -> Saved:
    """Return the shared prefixes that save the most tokens.

    Args:
        ordered: Distinct prompts, sorted.
        least: Minimum number of tokens in a prefix.
        level: Depth of this recursive call.
    """
    if len(ordered) < 2:
        return 0, []
    equal = common_length((ordered[0], ordered[-1]))
    whole = _whole(ordered, min(equal, len(ordered[0]) - 1), least)
    if len(ordered[0]) == equal:  # the first prompt is a prefix of the others, which may share more tokens without it
        whole = max(whole, _whole(ordered[1:], equal, least), key=itemgetter(0))
    if level == MOST_NESTED:
        return whole
    if whole[0]:
        least = equal + LEAST_LONGER
    parts = [
        _best(list(part), least, level + 1) for _, part in itertools.groupby(ordered, lambda one: one[: equal + 1])
    ]
    divided = sum(part[0] for part in parts), [found for part in parts for found in part[1]]
    return whole if whole[0] >= divided[0] else divided
