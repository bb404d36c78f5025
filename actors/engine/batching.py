"""Rows -> batches of similar length under a budget of cache bytes. A pure function: same rows, same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence


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
            raise ValueError(
                f"a row of {prompt_tokens[row]} prompt and {most_new} new tokens needs {alone} bytes of cache, "
                f"the budget is {budget_bytes}"
            )
        batches.append([row])
    return batches
