"""Rows -> batches of similar length under a budget of cache bytes, and what their prompts have in common.

Pure functions: same rows, same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.engine.errors import UserError

SHORTEST_PREFIX = 16  # tokens; below, looking after it costs more than it saves


def plan_batches(
    prompt_tokens: Sequence[int],
    max_new_tokens: Sequence[int],
    *,
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
    max_rows: int,
) -> list[list[int]]:
    """Batches of row numbers, longest prompts first, so that a batch that cannot fit is met at once.

    row_bytes: (longest prompt, most new tokens) of a batch -> cache bytes a row. budget_bytes: for one batch.
    Raises ValueError if a single row does not fit the budget.
    """
    order = sorted(range(len(prompt_tokens)), key=lambda row: (-prompt_tokens[row], -max_new_tokens[row], row))
    batches: list[list[int]] = []
    most_new = 0
    for row in order:
        if batches:
            batch = batches[-1]
            new = max(most_new, max_new_tokens[row])
            need = (len(batch) + 1) * row_bytes(prompt_tokens[batch[0]], new)
            if len(batch) < max_rows and need <= budget_bytes:
                batch.append(row)
                most_new = new
                continue
        most_new = max_new_tokens[row]
        alone = row_bytes(prompt_tokens[row], most_new)
        if alone > budget_bytes:
            raise UserError(
                f"a row of {prompt_tokens[row]} prompt and {most_new} new tokens needs {alone} bytes of cache, "
                f"the budget is {budget_bytes}"
            )
        batches.append([row])
    return batches


def constant_prefix(ids: Sequence[Sequence[int]]) -> list[int]:
    """Tokens with which all prompts begin; each keeps at least one of its own.

    [] if they are fewer than `SHORTEST_PREFIX`, and for a single prompt.
    A prompt that begins otherwise is no harm: whoever uses the prefix looks at each row.
    """
    if len(ids) < 2:
        return []
    ordered = sorted(list(one) for one in ids)
    first, last = ordered[0], ordered[-1]  # no other two have less in common
    most = min(len(one) for one in ids) - 1
    common = next((place for place in range(most) if first[place] != last[place]), most)
    return first[:common] if common >= SHORTEST_PREFIX else []
