"""How attention's programs divide rows, and the lane counts that have graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.gpu.splits import LONG_TOKENS, MOST, Splits, planned_splits
from actors.engine.gpu.steps import buckets
from actors.engine.working_memory import LONG_SPLITS


@given(st.integers(1, 2048), st.integers(1, 64), st.integers(1, 2**17), st.integers(2, 4096))
def test_programs_fill_the_gpu_and_long_rows_are_always_divided(
    lanes: int, kv_heads: int, longest: int, programs: int
) -> None:
    splits = planned_splits(lanes, kv_heads, longest, programs)
    if lanes * kv_heads * 2 <= programs:
        assert splits.least == 1 and lanes * kv_heads * splits.most <= programs
        assert splits.most == MOST or lanes * kv_heads * (splits.most + 1) > programs
    elif longest > LONG_TOKENS:
        assert splits == Splits(LONG_SPLITS, LONG_TOKENS)
    else:
        assert splits == Splits()


@given(st.integers(1, 2048))
def test_few_lanes_are_padding(most: int) -> None:
    counts = buckets(most)
    assert counts == sorted(set(counts)) and counts[-1] == most
    for lanes in range(1, most + 1):
        bucket = min(count for count in counts if count >= lanes)
        assert bucket <= max(2 * lanes - 1, 16) and bucket < lanes + max(lanes / 2 + 1, 32)
        assert lanes <= 128 or bucket - lanes < 32
