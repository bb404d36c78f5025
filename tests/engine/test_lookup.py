"""Prompt lookup: against a search through all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.exact.lookup import SIZES, Acceptance, Lookup

TOKENS = st.lists(st.integers(0, 3), max_size=30)


def searched(tokens: list[int], most: int) -> tuple[int, list[int]] | None:
    """Size of the longest n-gram at the end that came before, and what followed its last occurrence."""
    for size in SIZES:
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[len(tokens) - size :]:
                copied = list(tokens)
                for number in range(most):
                    copied.append(copied[place + number])
                return size, copied[len(tokens) :]
    return None


@given(prompt=TOKENS.filter(bool), answer=TOKENS, steps=st.lists(st.integers(1, 5)), most=st.integers(1, 8))
def test_what_is_found_is_what_a_search_finds(
    prompt: list[int], answer: list[int], steps: list[int], most: int
) -> None:
    """However many tokens the answer grows by between two calls."""
    lookup, length = Lookup(prompt, {}), 0
    for step in (0, *steps):
        length = min(len(answer), length + step)
        found = lookup.find(answer[:length], most)
        assert (None if found is None else (found.size, found.tokens)) == searched(prompt + answer[:length], most)


def test_a_row_begins_with_the_acceptance_of_all_rows_and_keeps_its_own() -> None:
    of_all = {size: Acceptance() for size in SIZES}
    good, bad = (Lookup([1, 2, 3, 1, 2], of_all) for _ in range(2))
    match = good.find((), 4)
    assert match is not None and (match.size, match.tokens) == (2, [3, 1, 2, 3])
    assert good.acceptance(match) == bad.acceptance(match) == pytest.approx(0.5)
    for _ in range(20):
        good.judge(match, 4, 4)
        bad.judge(match, 0, 1)
    new = Lookup([1, 2, 3, 1, 2], of_all)
    assert bad.acceptance(match) < 0.2 < new.acceptance(match) < good.acceptance(match)
    assert good.acceptance(match) > 0.8
