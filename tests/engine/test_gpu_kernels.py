"""The GPU's kernels against plain torch: by Triton's interpreter where there is no GPU, and compiled where there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine.gpu import kernels, reference  # noqa: E402
from actors.engine.gpu.pages import PAGE_TOKENS  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
)  # the interpreter has no bfloat16
many = settings(max_examples=25 if CUDA else 12, deadline=None)


def near(got: torch.Tensor, want: torch.Tensor, bfloat16: float = 2**-6) -> None:
    wide = bfloat16 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, rtol=wide, atol=wide)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


@many
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), DTYPES, st.integers(0, 99))
def test_norms(lanes: int, width: int, centred: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, weight = 3 * randn(lanes, width, dtype=dtype) + 1, randn(width, dtype=dtype)
    bias = randn(width, dtype=dtype) if centred else None
    near(kernels.norm(hidden, weight, bias, 1e-5), reference.norm(hidden, weight, bias, 1e-5))


@many
@given(st.integers(1, 5), st.integers(1, 2500), DTYPES, st.integers(0, 99))
def test_gates_and_residuals(lanes: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    wide = randn(lanes, 2 * width, dtype=dtype)
    near(kernels.gate(wide), reference.gate(wide))
    hidden, change = wide[:, :width].contiguous(), wide[:, width:].contiguous()
    depths = torch.randint(0, 4, (lanes,), dtype=torch.int32, device=DEVICE)
    want = hidden.clone()
    reference.add(want, change, depths, 1)
    kernels.add(hidden, change, depths, 1)
    near(hidden, want)


@many
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 5]),
    size=st.sampled_from([8, 16, 24, 64]),
    splits=st.sampled_from([1, 2, 5]),
    turns=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_a_token_is_put_into_its_page_and_sees_what_lies_before_it(
    lengths: list[int], kv_heads: int, group: int, size: int, splits: int, turns: bool, dtype: torch.dtype, seed: int
) -> None:
    """One lane of several does not run the layer: nothing is written for it. Pages lie in no order, and those of nobody
    hold what is no number."""
    torch.manual_seed(seed)
    lanes, heads = len(lengths), kv_heads * group
    width = -(-max(lengths) // PAGE_TOKENS)
    order = torch.randperm(lanes * width) + 1
    table = order.view(lanes, width).to(torch.int32).to(DEVICE)
    slots = torch.randperm(lanes).to(DEVICE)
    places = torch.tensor(lengths, device=DEVICE) - 1
    depths = torch.full((lanes,), 5, dtype=torch.int32, device=DEVICE)
    if lanes > 1:
        depths[seed % lanes] = 2
    runs = depths > 2
    pools = [randn(lanes * width + 1, kv_heads, PAGE_TOKENS, size, dtype=dtype) for _ in range(2)]
    pools += [pool.clone() for pool in pools]
    states = randn(lanes, heads + 2 * kv_heads, size, dtype=dtype)
    rotary = (randn(lanes, size, dtype=dtype), randn(lanes, size, dtype=dtype)) if turns else None
    where = table, slots, places, depths, 2
    want = reference.append(states, rotary, heads, *pools[2:], *where)
    got = kernels.append(states, rotary, heads, *pools[:2], *where)
    near(got, want, 2**-4)  # of two products of up to 16, one may be rounded by itself, or not
    for pool, wanted in zip(pools[:2], pools[2:], strict=True):
        near(pool[1:], wanted[1:], 2**-4)  # page 0 is nobody's
        pool[0] = torch.nan
    attended = kernels.attend(got, *pools[:2], *where, 0.25, splits)
    near(attended[runs], reference.attend(got, *pools[2:], *where, 0.25)[runs], 2**-4)
