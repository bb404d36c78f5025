"""Rows -> batches of similar length within a budget of cache bytes; the common prefix of prompts.

Pure functions: the same rows give the same batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from actors.engine.errors import UserError

SHORTEST_PREFIX = 16  # tokens; a shorter prefix costs more than it saves


def plan_batches(
    prompt_tokens: Sequence[int],
    max_new_tokens: Sequence[int],
    *,
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
    max_rows: int,
    groups: Sequence[int] | None = None,
    shared: Sequence[int] | None = None,
) -> list[list[int]]:
    """Batches of row numbers, longest prompts first, so that a batch that does not fit the memory comes first.

    Rows of a group follow each other, the group with the longest prompt first.

    Args:
        prompt_tokens: Tokens of each row's prompt.
        max_new_tokens: Most new tokens of each row.
        row_bytes: (longest prompt, most new tokens) of a batch -> cache bytes a row.
        budget_bytes: Bytes of a batch's cache.
        max_rows: Most rows of a batch.
        groups: Group of each row; None: one.
        shared: First tokens of each row's prompt that the cache stores once for its group; None: none.

    Raises:
        UserError: A row that does not fit the budget alone.
    """
    groups, shared = groups or [0] * len(prompt_tokens), shared or [0] * len(prompt_tokens)
    longest_of: dict[int, int] = {}
    for group, tokens in zip(groups, prompt_tokens, strict=True):
        longest_of[group] = max(tokens, longest_of.get(group, 0))
    order = sorted(
        range(len(prompt_tokens)),
        key=lambda row: (-longest_of[groups[row]], groups[row], -prompt_tokens[row], -max_new_tokens[row], row),
    )
    batches: list[list[int]] = []
    longest = most_new = 0
    stored = Counter[int]()  # rows of the batch by tokens that another one of it has stored
    for row in order:
        if batches:
            batch = batches[-1]
            new, long = max(most_new, max_new_tokens[row]), max(longest, prompt_tokens[row])
            counts = stored + Counter((shared[row] if groups[row] == groups[batch[-1]] else 0,))
            size = sum(count * row_bytes(long - before, new) for before, count in counts.items())
            if len(batch) < max_rows and size <= budget_bytes:
                batch.append(row)
                most_new, longest, stored = new, long, counts
                continue
        longest, most_new = prompt_tokens[row], max_new_tokens[row]
        alone = row_bytes(longest, most_new)
        if alone > budget_bytes:
            raise UserError(
                f"a row of {longest} prompt and {most_new} new tokens needs {alone} bytes of cache, "
                f"the budget is {budget_bytes}"
            )
        batches.append([row])
        stored = Counter((0,))
    return batches


def constant_prefix(ids: Sequence[Sequence[int]]) -> list[int]:
    """Tokens with which all prompts begin; every prompt has at least one more.

    [] if they are fewer than `SHORTEST_PREFIX`, and for a single prompt. The scheduler checks each row for the prefix,
    so it may be used with other prompts too.
    """
    if len(ids) < 2:
        return []
    common = min(common_length(ids), min(len(prompt) for prompt in ids) - 1)
    return list(ids[0][:common]) if common >= SHORTEST_PREFIX else []


def common_length(lists: Sequence[Sequence[int]]) -> int:
    """With how many equal tokens all lists begin."""
    ordered = [list(one) for one in lists]
    least, greatest = min(ordered), max(ordered)  # the two that differ first
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def begins_with(prompt: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether a prompt begins with a prefix and has further tokens."""
    return 0 < len(prefix) < len(prompt) and list(prompt[: len(prefix)]) == list(prefix)
