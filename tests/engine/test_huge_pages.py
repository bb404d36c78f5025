"""Weights in huge pages: the same numbers, aligned for the kernels, alive as long as they are used."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.cpu.products import ALIGNED, PAGE, to_huge_pages
from actors.engine.errors import is_out_of_memory

DTYPES = [torch.bfloat16, torch.uint8, torch.float32]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
)
def test_moved_weights_are_the_same_numbers_side_by_side(shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randint(0, 255, shape, generator=generator).to(dtype) for shape in shapes]
    moved = [weight.clone() for weight in weights]
    to_huge_pages(moved)
    gc.collect()
    first = moved[0].data_ptr()
    assert first % PAGE == 0
    for one, weight in zip(moved, weights, strict=True):
        assert torch.equal(one, weight) and one.is_contiguous() and one.data_ptr() % ALIGNED == 0
        assert first <= one.data_ptr() < first + sum(each.nbytes + ALIGNED for each in weights)


def test_a_kernel_without_huge_pages_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    weights = [torch.arange(1000)]
    monkeypatch.setattr(mmap, "mmap", Refused)
    to_huge_pages(weights)
    assert torch.equal(weights[0], torch.arange(1000))


def test_memory_that_runs_out_is_told_as_that() -> None:
    """By what the system really answers: a step that first needs a region is run again with fewer rows."""
    with pytest.raises(MemoryError, match="cannot allocate 4611686018431582208 bytes for weights: ") as caught:
        to_huge_pages([torch.zeros(1).expand(2**60)])
    assert is_out_of_memory(caught.value)
