"""The GPU's kernels against plain torch: by Triton's interpreter where there is no GPU, and compiled where there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine.checkpoint.layer_weights import NormWeights  # noqa: E402
from actors.engine.constraints.constraint import words_of  # noqa: E402
from actors.engine.gpu import kernels, reference  # noqa: E402
from actors.engine.gpu import logits as gpu_logits  # noqa: E402
from actors.engine.gpu.kernels import logits as kernel_logits  # noqa: E402
from actors.engine.gpu.logits import MOST_SEEN  # noqa: E402
from actors.engine.gpu.operations import Lanes, LayerPages, Operations, StepTables  # noqa: E402
from actors.engine.gpu.pages import PAGE_TOKENS  # noqa: E402
from actors.engine.gpu.splits import Splits  # noqa: E402
from actors.engine.gpu.state import DeviceRows  # noqa: E402

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


def norm_weights(width: int, centred: bool, dtype: torch.dtype) -> NormWeights:
    return NormWeights(randn(width, dtype=dtype), randn(width, dtype=dtype) if centred else None, 1e-5)


def lanes_of(depths: torch.Tensor) -> Lanes:
    """Lanes of which only the depths matter."""
    nothing = torch.zeros(len(depths), dtype=torch.int64, device=DEVICE)
    return Lanes(nothing, nothing, depths, None)


@many
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), DTYPES, st.integers(0, 99))
def test_norms(lanes: int, width: int, centred: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    hidden = 3 * randn(lanes, width, dtype=dtype) + 1
    weights = norm_weights(width, centred, dtype)
    near(kernels.norm(hidden, weights), reference.norm(hidden, weights))


@many
@given(
    lanes=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 8, 24]),
    joined=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_norms_of_queries_and_keys(
    lanes: int, kv_heads: int, group: int, size: int, joined: bool, dtype: torch.dtype, seed: int
) -> None:
    """Of each head, and of all heads together; values stay."""
    torch.manual_seed(seed)
    heads = kv_heads * group, kv_heads
    got = 3 * randn(lanes, heads[0] + 2 * heads[1], size, dtype=dtype)
    want = got.clone()
    norms = [norm_weights(count * size if joined else size, False, dtype) for count in heads]
    kernels.norm_heads(got, heads[0], norms[0], norms[1])
    reference.norm_heads(want, heads[0], norms[0], norms[1])
    near(got, want)


@many
@given(st.integers(1, 5), st.integers(1, 2500), DTYPES, st.integers(0, 99))
def test_gates_and_residuals(lanes: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    wide = randn(lanes, 2 * width, dtype=dtype)
    near(kernels.gate(wide), reference.gate(wide))
    hidden, change = wide[:, :width].contiguous(), wide[:, width:].contiguous()
    some = lanes_of(torch.randint(0, 4, (lanes,), dtype=torch.int32, device=DEVICE))
    want = hidden.clone()
    reference.add(want, change, some, 1)
    kernels.add(hidden, change, some, 1)
    near(hidden, want)


@many
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), DTYPES, st.integers(0, 99))
def test_residuals_with_the_norm_behind_them(
    lanes: int, width: int, centred: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, change = randn(lanes, width, dtype=dtype), randn(lanes, width, dtype=dtype)
    weights, some = norm_weights(width, centred, dtype), lanes_of(torch.randint(0, 4, (lanes,), device=DEVICE).int())
    mine, theirs = hidden.clone(), hidden.clone()
    got = kernels.add_norm(mine, change, some, 1, weights)
    want = reference.add_norm(theirs, change, some, 1, weights)
    near(got[some.depths > 1], want[some.depths > 1], 2**-5)
    near(mine, theirs)


def rows_in_flight(count: int, stop_tokens: int, seed: int) -> DeviceRows:
    """Somewhere on their way; the last row is nobody's."""
    chance = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (count + 1, *shape), generator=chance).to(DEVICE)

    rows = DeviceRows(count, 12, stop_tokens, 20, DEVICE)
    rows.last, rows.counts, rows.limits, rows.least = numbers(0, 20), numbers(0, 12), numbers(1, 13), numbers(0, 4)
    rows.generated, rows.positions = rows.counts - 1, rows.counts + numbers(0, 30)
    rows.tokens, rows.stops = numbers(0, 20, 12), numbers(-1, 6, stop_tokens)
    rows.ended[:-1] = numbers(0, 2)[:-1] == 0
    return rows


@many
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_what_lanes_have_drawn_is_noted(lanes: int, stop_tokens: int, padding: int, told: bool, seed: int) -> None:
    """Lanes beside the rows in flight are nobody's, all of them the same one."""
    mine, theirs = (rows_in_flight(lanes, stop_tokens, seed) for _ in range(2))
    slots = torch.cat((torch.full((padding,), lanes), torch.randperm(lanes))).to(DEVICE)
    tokens = torch.randint(0, 6, (len(slots),), device=DEVICE)
    logprobs = randn(len(slots)) if told else None
    kernels.finish(slots, tokens, logprobs, mine)
    reference.finish(slots, tokens, logprobs, theirs)
    for name in ("last", "counts", "positions", "generated", "tokens", "ended", "logprobs"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))


@many
@given(
    lanes=st.integers(1, 4),
    width=st.sampled_from([1, 5, 64, 300, 2500]),
    shape=st.sampled_from(["flat", "peaked", "tied"]),
    kind=st.sampled_from(["greedy", "temperature", "narrowed"]),
    barred=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 999),
)
def test_tokens_are_sampled_as_by_torch(
    lanes: int, width: int, shape: str, kind: str, barred: bool, dtype: torch.dtype, seed: int
) -> None:
    """Or the random number lies at the end of the token's share: weights are float32 here, float64 there."""
    chance = torch.Generator().manual_seed(seed)
    normal = torch.randn(lanes, width, generator=chance)
    made = {"flat": normal, "peaked": -((normal * 3).abs() ** 1.5) * 3, "tied": (normal * 2).round()}[shape]
    logits = made.to(DEVICE, dtype)
    adjusted = logits
    if barred and width > 1:
        adjusted = logits.index_fill(1, torch.randint(width, (1,), generator=chance).to(DEVICE), -torch.inf)
    rows = DeviceRows(lanes, 4, 1, width, DEVICE)
    slots = torch.randperm(lanes + 1, generator=chance)[:lanes].to(DEVICE)

    def chosen(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (lanes + 1,), generator=chance)].to(DEVICE)

    rows.temperature = chosen([0.0, 0.5, 1.0, 2.5]).double()
    rows.top_k = chosen([0, 1, 3, 40, 10**6]).long()
    rows.top_p, rows.min_p = chosen([1.0, 0.1, 0.9, 0.999]).double(), chosen([0.0, 0.05, 1.0]).double()
    numbers = None if kind == "greedy" else torch.rand(lanes, dtype=torch.float64, generator=chance).to(DEVICE)
    how = {"narrowed": kind == "narrowed", "logprobs": True}
    tokens, scores = kernels.sample(logits, adjusted, slots, numbers, rows, **how)
    wanted, wanted_scores = reference.sample(logits, adjusted, slots, numbers, rows, **how)
    assert scores is not None and wanted_scores is not None
    for lane in (tokens != wanted).nonzero()[:, 0].tolist():
        assert numbers is not None
        near_numbers = [(numbers + change).clamp(0, 1 - 1e-9) for change in (-4e-6, 4e-6)]
        allowed = [reference.sample(logits, adjusted, slots, one, rows, **how)[0][lane] for one in near_numbers]
        assert int(tokens[lane]) in [int(one) for one in allowed]
    same = tokens == wanted
    torch.testing.assert_close(scores[same], wanted_scores[same], atol=2e-5, rtol=1e-5)


@many
@given(
    lanes=st.integers(1, 4),
    padding=st.integers(0, 2),
    width=st.sampled_from([1, 5, 64, 300, 2500]),
    penalized=st.booleans(),
    barred=st.booleans(),
    masked=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 999),
)
def test_logits_are_adjusted_as_by_torch(
    lanes: int, padding: int, width: int, penalized: bool, barred: bool, masked: bool, dtype: torch.dtype, seed: int
) -> None:
    """Also of rows before their first token, and of padding lanes, which share a slot. One logit is no number."""
    chance = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (lanes + 1, *shape), generator=chance).to(DEVICE)

    rows = DeviceRows(lanes, 4, 3, width, DEVICE)
    rows.last, rows.counts, rows.least, rows.stops = numbers(0, width), numbers(0, 4), numbers(0, 4), numbers(-1, 9, 3)
    rows.counts[-1] = 0
    rows.penalties = 0.5 + torch.rand(lanes + 1, 3, generator=chance).to(DEVICE)
    seen = (numbers(0, 5, width) * numbers(0, 2, width)).to(torch.int16)
    seen[0] = torch.where(seen[0] > 0, MOST_SEEN, 0)
    rows.masks = numbers(-(2**31), 2**31, words_of(width)).to(torch.int32)
    slots = torch.cat((torch.full((padding,), lanes), torch.randperm(lanes, generator=chance))).to(DEVICE)
    logits = (3 * torch.randn(len(slots), width, generator=chance)).to(DEVICE, dtype)
    logits[-1, width // 2] = torch.nan
    how = {"penalized": penalized, "barred": barred, "masked": masked}
    counted, done = [], []
    for operations in (gpu_logits, kernel_logits):
        rows.seen = seen.clone()
        done.append(operations.adjust(logits, slots, rows, **how))
        counted.append(rows.seen)
    torch.testing.assert_close(done[1], done[0], equal_nan=True)
    assert torch.equal(*counted) and (penalized or torch.equal(counted[0], seen))
    tokens = torch.randint(width, (len(slots),), generator=chance).to(DEVICE)
    got, want = (one.masked_logprobs(logits, slots, tokens, rows) for one in (kernel_logits, gpu_logits))
    torch.testing.assert_close(got[:-1], want[:-1], atol=2e-5, rtol=1e-5)


@many
@given(st.integers(1, 6), st.integers(1, 1100), st.sampled_from("tpn"), st.booleans(), DTYPES, st.integers(0, 99))
def test_what_lanes_begin_with(lanes: int, width: int, embeds: str, rope: bool, dtype: torch.dtype, seed: int) -> None:
    """By token, by token and position, or not at all. Positions behind the tables are those of rows that have ended."""
    torch.manual_seed(seed)
    rows, longest, size = rows_in_flight(lanes, 1, seed), 25, 8
    by_token, by_position = randn(20, width, dtype=dtype), randn(longest, width, dtype=dtype)
    rotary = (randn(longest, size, dtype=dtype), randn(longest, size, dtype=dtype)) if rope else None
    depths = torch.randint(1, 9, (7,), dtype=torch.int32, device=DEVICE)
    tables = StepTables(
        depths, longest, None if embeds == "n" else by_token, by_position if embeds == "p" else None, rotary
    )
    slots = torch.randperm(lanes + 1).to(DEVICE)

    def written(operations: Operations) -> list[torch.Tensor]:
        positions, depths = (torch.zeros(lanes + 1, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.int32))
        hidden = torch.zeros(lanes + 1, width, dtype=dtype, device=DEVICE)
        cosines, sines = torch.zeros(2, lanes + 1, size, dtype=dtype, device=DEVICE)
        operations.begin(Lanes(slots, positions, depths, (cosines, sines) if rope else None), rows, tables, hidden)
        return [positions, depths, hidden, cosines, sines]

    for got, want in zip(written(kernels), written(reference), strict=True):
        torch.testing.assert_close(got, want)


@many
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 5]),
    size=st.sampled_from([8, 16, 24, 64]),
    splits=st.builds(Splits, st.sampled_from([1, 2, 5]), st.sampled_from([1, 64, 128])),
    rotary_part=st.sampled_from([None, 2, 4]),  # of a head's numbers: none, a half, all
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_a_token_is_put_into_its_page_and_sees_what_lies_before_it(
    lengths: list[int],
    kv_heads: int,
    group: int,
    size: int,
    splits: Splits,
    rotary_part: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """One lane of several does not run the layer: nothing is written for it. Pages lie in no order, and those of nobody
    hold what is no number."""
    torch.manual_seed(seed)
    lanes, heads = len(lengths), kv_heads * group
    width = -(-max(lengths) // PAGE_TOKENS)
    order = torch.randperm(lanes * width) + 1
    table = order.view(lanes, width).to(torch.int32).to(DEVICE)
    slots = torch.randperm(lanes).to(DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    depths = torch.full((lanes,), 5, dtype=torch.int32, device=DEVICE)
    if lanes > 1:
        depths[seed % lanes] = 2
    runs = depths > 2
    pools = [randn(lanes * width + 1, kv_heads, PAGE_TOKENS, size, dtype=dtype) for _ in range(2)]
    pools += [pool.clone() for pool in pools]
    states = randn(lanes, heads + 2 * kv_heads, size, dtype=dtype)
    rotary = None
    if rotary_part is not None:
        rotary_size = size * rotary_part // 4
        rotary = randn(lanes, rotary_size, dtype=dtype), randn(lanes, rotary_size, dtype=dtype)
    some = Lanes(slots, positions, depths, rotary)
    mine, theirs = LayerPages(pools[0], pools[1], table), LayerPages(pools[2], pools[3], table)
    dense = [torch.zeros(2, lanes, kv_heads, size, dtype=dtype, device=DEVICE) for _ in range(3)]
    want = reference.append(states, heads, rotary, theirs, some, 2, (dense[0][0], dense[0][1]))
    got = kernels.append(states, heads, rotary, mine, some, 2, (dense[1][0], dense[1][1]) if seed % 2 else None)
    assert torch.equal(got, kernels.append(states, heads, rotary, None, some, 2, (dense[2][0], dense[2][1])))
    near(dense[2], dense[0], 2**-4)
    assert torch.equal(dense[1], dense[2] if seed % 2 else torch.zeros_like(dense[1]))
    near(got, want, 2**-4)  # of two products of up to 16, one may be rounded by itself, or not
    for pool, wanted in zip(pools[:2], pools[2:], strict=True):
        near(pool[1:], wanted[1:], 2**-4)  # page 0 is nobody's
        pool[0] = torch.nan
    attended = kernels.attend(got, mine, some, 2, 0.25, splits)
    near(attended[runs], reference.attend(got, theirs, some, 2, 0.25)[runs], 2**-4)
