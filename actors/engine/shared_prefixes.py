"""Beginnings that prompts share, such as one few-shot block for each category: each is computed once for its rows.

Pure functions: the same prompts give the same prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter

from actors.engine.batching import begins_with, common_length

LEAST_TOKENS = 32  # of a shared beginning, behind the one of all prompts
LEAST_SAVED = 512  # tokens that a beginning saves: passes for few rows each would cost more
MOST_NESTED = 50  # beginnings of beginnings that are looked at
Prompt = tuple[int, ...]
Saved = tuple[int, list[tuple[Prompt, Sequence[Prompt]]]]  # tokens saved; beginnings, and the prompts of each


def shared_prefixes(
    prompts: Sequence[Sequence[int]], prefix: Sequence[int] = (), *, nested: bool = True
) -> list[Prompt]:
    """The beginning of each prompt that is computed once for all prompts which have it; () for none.

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
    """With one beginning of this length for all members."""
    saved = (len(members) - 1) * (length - before)
    if length - before < LEAST_TOKENS or saved < LEAST_SAVED:
        return 0, []
    return saved, [(members[0][:length], members)]


def _best(ordered: Sequence[Prompt], before: int, nested: int) -> Saved:
    """The choice of beginnings that saves most.

    Args:
        ordered: Distinct prompts in their order, which are equal for `before` tokens.
        before: Tokens that need no saving.
        nested: Calls that this one is nested in.
    """
    if len(ordered) < 2:
        return 0, []
    equal = common_length((ordered[0], ordered[-1]))
    whole = _whole(ordered, min(equal, len(ordered[0]) - 1), before)
    if len(ordered[0]) == equal:  # the others may share one token more
        whole = max(whole, _whole(ordered[1:], equal, before), key=itemgetter(0))
    if nested == MOST_NESTED:
        return whole
    parts = [
        _best(list(part), before, nested + 1) for _, part in itertools.groupby(ordered, lambda one: one[: equal + 1])
    ]
    divided = sum(part[0] for part in parts), [found for part in parts for found in part[1]]
    return whole if whole[0] >= divided[0] else divided
