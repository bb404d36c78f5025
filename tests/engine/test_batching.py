from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.scheduler import plan_batches


def bytes_of(prompt_tokens: int, max_new_tokens: int) -> int:
    return 3 * prompt_tokens + 2 * max_new_tokens


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=60), st.integers(250, 3000), st.integers(1, 9)
)
def test_batches_hold_every_row_once_within_the_budget(rows: list[tuple[int, int]], budget: int, most: int) -> None:
    prompts, news = [row[0] for row in rows], [row[1] for row in rows]
    batches = plan_batches(prompts, news, row_bytes=bytes_of, budget_bytes=budget, max_rows=most)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        assert 1 <= len(batch) <= most
        longest, new = max(prompts[row] for row in batch), max(news[row] for row in batch)
        assert len(batch) * bytes_of(longest, new) <= budget
    lengths = [prompts[row] for batch in batches for row in batch]
    assert lengths == sorted(lengths, reverse=True)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 3)), max_size=60),
    st.integers(450, 3000),
    st.integers(1, 20),
)
def test_rows_of_a_group_follow_each_other_in_full_batches(
    rows: list[tuple[int, int, int]], budget: int, most: int
) -> None:
    prompts, news, groups = ([row[part] for row in rows] for part in range(3))
    batches = plan_batches(prompts, news, row_bytes=bytes_of, budget_bytes=budget, max_rows=most, groups=groups)
    order = [groups[row] for batch in batches for row in batch]
    assert len(list(itertools.groupby(order))) == len(set(groups))

    def size(batch: list[int]) -> int:
        return len(batch) * bytes_of(max(prompts[row] for row in batch), max(news[row] for row in batch))

    for batch, then in itertools.pairwise([*batches, []]):
        assert 1 <= len(batch) <= most and size(batch) <= budget
        assert not then or len(batch) == most or size([*batch, then[0]]) > budget


def test_a_row_that_fits_no_budget_is_named() -> None:
    with pytest.raises(
        ValueError, match="a row of 9 prompt and 4 new tokens needs 35 bytes of cache, the budget is 34"
    ):
        plan_batches([9], [4], row_bytes=bytes_of, budget_bytes=34, max_rows=4)
