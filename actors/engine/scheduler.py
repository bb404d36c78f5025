"""Which rows share the engine's slots, and which beginnings of prompts are computed once.

Pure functions of prompts, lengths and budget: the same requests give the same runs, so that a resumed job runs the same
batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from actors.engine.errors import UserError

SPREAD = 2  # maximum ratio of longest to shortest prompt in a run; every slot is padded to the longest
SHORTEST_PREFIX = 16  # tokens; a shorter prefix of all prompts costs more than it saves
LEAST_TOKENS = 32  # fewest tokens of a beginning that some prompts share, after the prefix of all prompts
LEAST_SAVED = 512  # tokens that a beginning must save: a pass for few rows costs more
MOST_NESTED = 50  # depth of the search for beginnings of beginnings
Prompt = tuple[int, ...]
Saved = tuple[
    int, list[tuple[Prompt, Sequence[Prompt]]]
]  # number of tokens saved; shared prefixes with the prompts of each


@dataclass(frozen=True)
class Run:
    """Rows that share one `open` of the engine."""

    rows: list[int]  # indices of requests, in the order of their admission
    capacity: int  # most rows in flight
    apart: bool = False  # whether the run shares the engine with no other run, since memory has run out


def plan_batches(
    prompt_tokens: Sequence[int],  # tokens of each row's prompt
    max_new_tokens: Sequence[int],  # most new tokens of each row
    *,
    row_bytes: Callable[[int, int], int],  # (longest prompt, most new tokens) of a batch -> cache bytes a row
    budget_bytes: int,  # bytes of a batch's cache
    max_rows: int,  # most rows of a batch
    groups: Sequence[int] | None = None,  # group of each row; None: one
) -> list[list[int]]:
    """Return batches of row numbers, longest prompts first, so that a batch that does not fit the memory comes first.

    Rows of a group follow each other, the group with the longest prompt first.

    Raises:
        UserError: A row that does not fit the budget alone.
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
        alone = row_bytes(longest, most_new)
        if alone > budget_bytes:
            raise UserError(
                f"a row of {longest} prompt and {most_new} new tokens needs {alone} bytes of cache, "
                f"the budget is {budget_bytes}"
            )
        batches.append([row])
    return batches


def merge(
    runs: Sequence[Run],
    lengths: Sequence[int],
    limits: Sequence[int],
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
) -> list[Run]:
    """Join batches of similar prompts, longest first, into fewer and longer runs whose slots are refilled.

    All slots of a run are as large as its longest prompt and its most new tokens require: a batch that would cost
    the others half of their slots stays apart.
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
    """Return runs of the same rows with at most half as many in flight; a batch becomes two halves."""
    if run.capacity == 1:
        return [replace(run, rows=[row]) for row in run.rows]
    if run.capacity >= len(run.rows):
        half = (len(run.rows) + 1) // 2
        halves = run.rows[:half], run.rows[half:]
        return [replace(run, rows=rows, capacity=len(rows)) for rows in halves if rows]
    return [replace(run, capacity=run.capacity // 2)]


def constant_prefix(ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all prompts begin; every prompt has at least one more.

    [] if they are fewer than `SHORTEST_PREFIX`, and for a single prompt. The loop checks each row for the prefix,
    so it may be used with other prompts too.
    """
    if len(ids) < 2:
        return []
    common = min(common_length(ids), min(len(prompt) for prompt in ids) - 1)
    return list(ids[0][:common]) if common >= SHORTEST_PREFIX else []


def common_length(lists: Sequence[Sequence[int]]) -> int:
    """Return the number of equal tokens with which all lists begin."""
    ordered = [list(one) for one in lists]
    least, greatest = min(ordered), max(ordered)  # the two that differ first
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def begins_with(prompt: Sequence[int], prefix: Sequence[int]) -> bool:
    """Return whether a prompt begins with a prefix and has further tokens."""
    return 0 < len(prefix) < len(prompt) and list(prompt[: len(prefix)]) == list(prefix)


def shared_prefixes(
    prompts: Sequence[Sequence[int]], prefix: Sequence[int] = (), *, nested: bool = True
) -> list[Prompt]:
    """Return the beginning of each prompt that is computed once for all prompts which have it; () for none.

    Every prompt has at least one token more. Of prompts that share a beginning either all take it, or groups of them
    take longer ones, whichever saves more tokens.

    Args:
        prompts: Token ids.
        prefix: With which most prompts begin.
        nested: Whether to search for beginnings besides `prefix`.
    """
    base = tuple(prefix)
    having = [begins_with(prompt, base) for prompt in prompts]
    if not nested:
        return [base if one else () for one in having]
    chosen: dict[Prompt, Prompt] = {}
    for has, before in ((True, base), (False, ())):
        distinct = sorted({tuple(prompt) for prompt, one in zip(prompts, having, strict=True) if one == has})
        _, found = _best(distinct, len(before), 0)
        chosen |= dict.fromkeys(distinct, before)
        chosen |= {prompt: common for common, members in found for prompt in members}
    return [chosen[tuple(prompt)] for prompt in prompts]


def _whole(members: Sequence[Prompt], length: int, before: int) -> Saved:
    """Return the savings of one beginning of this length for all members."""
    saved = (len(members) - 1) * (length - before)
    if length - before < LEAST_TOKENS or saved < LEAST_SAVED:
        return 0, []
    return saved, [(members[0][:length], members)]


def _best(ordered: Sequence[Prompt], before: int, nested: int) -> Saved:
    """Return the choice of beginnings that saves most.

    Args:
        ordered: Distinct prompts in their order, which are equal for `before` tokens.
        before: Tokens that need no saving.
        nested: Calls that this one is nested in.
    """
    if len(ordered) < 2:
        return 0, []
    equal = common_length((ordered[0], ordered[-1]))
    whole = _whole(ordered, min(equal, len(ordered[0]) - 1), before)
    if len(ordered[0]) == equal:  # other prompts may share one token more
        whole = max(whole, _whole(ordered[1:], equal, before), key=itemgetter(0))
    if nested == MOST_NESTED:
        return whole
    parts = [
        _best(list(part), before, nested + 1) for _, part in itertools.groupby(ordered, lambda one: one[: equal + 1])
    ]
    divided = sum(part[0] for part in parts), [found for part in parts for found in part[1]]
    return whole if whole[0] >= divided[0] else divided
