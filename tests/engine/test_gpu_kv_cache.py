"""A cache of 8 bits on the paged engine: codes and scales, kernels, and answers against the definition's oracle."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import PREFIX, SPECS, STOP, any_schedule, requests, with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers, oracle_logits_each
from rounded_cache import rounded, rounded_answer, rounded_logits
from test_gpu_engine import FUSED, fused
from tiny_models import LAYERS, tiny_model
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine import build  # noqa: E402
from actors.engine.compressed import LIMITS, Kind  # noqa: E402
from actors.engine.decoder import Decoder  # noqa: E402
from actors.engine.errors import UserError  # noqa: E402
from actors.engine.exact import Drafter  # noqa: E402
from actors.engine.gpu import kernels, reference  # noqa: E402
from actors.engine.gpu.engine import GpuEngine  # noqa: E402
from actors.engine.gpu.exact import GpuExactEngine  # noqa: E402
from actors.engine.gpu.operations import Lanes, LayerPages  # noqa: E402
from actors.engine.gpu.pages import PAGE_TOKENS, PagedCache, page_bytes, row_pages, token_bytes  # noqa: E402
from actors.engine.gpu.products import DTYPES  # noqa: E402
from actors.engine.gpu.splits import Splits  # noqa: E402
from actors.engine.schedule import Schedule, ScheduleSpec  # noqa: E402
from actors.engine.scheduler import generate  # noqa: E402
from actors.engine.types import Request  # noqa: E402
from actors.generator import Generator  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
KINDS = st.sampled_from(list(LIMITS))
SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
UNPENALIZED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# root mean square of an error of logits, in their standard deviations: random weights magnify what is rounded
BOUNDS: dict[Kind, float] = {"int8": 0.08, "fp8": 0.3}
many = settings(max_examples=20, deadline=None)


def pages_of(lengths: list[int], kv_heads: int, size: int, kind: Kind) -> LayerPages:
    """Pages for rows of so many tokens, in no order; page 0 is nobody's."""
    width = -(-max(lengths) // PAGE_TOKENS)
    table = (torch.randperm(len(lengths) * width) + 1).view(len(lengths), width).to(torch.int32).to(DEVICE)
    shape = len(lengths) * width + 1, kv_heads, PAGE_TOKENS, size
    keys, values = (torch.zeros(shape, dtype=DTYPES[kind], device=DEVICE) for _ in range(2))
    scales = torch.zeros(shape[:-1], device=DEVICE), torch.zeros(shape[:-1], device=DEVICE)
    return LayerPages(keys, values, table, scales)


def copied(pages: LayerPages) -> LayerPages:
    assert pages.scales is not None
    return LayerPages(
        pages.keys.clone(), pages.values.clone(), pages.table, (pages.scales[0].clone(), pages.scales[1].clone())
    )


def states_of(count: int, heads: int, size: int, spread: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, heads, D]; each head of each token has a magnitude of its own, and some numbers are outliers."""
    states = torch.randn(count, heads, size) * 10.0 ** (spread * (torch.rand(count, heads, 1) - 0.5))
    states[torch.rand(states.shape) < 0.02] *= 200
    return states.to(dtype).to(DEVICE)


def filled(pages: LayerPages, lengths: list[int], keys: Tensor, values: Tensor) -> None:
    """Write each row's tokens, keys and values [sum of lengths, H, D], as passes over prompts do."""
    rows = torch.cat([torch.full((length,), row) for row, length in enumerate(lengths)]).to(DEVICE)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    own = pages.table[rows, positions // PAGE_TOKENS].long()
    pages.write(own, positions, keys, values, reference.round_rows)


def half_step(numbers: Tensor, kind: Kind) -> Tensor:
    """How far codes of numbers [..., D] may lie from them: half the distance between two codes, in float64."""
    scale = numbers.double().abs().amax(dim=-1, keepdim=True) / LIMITS[kind]
    half = scale / 2 if kind == "int8" else torch.maximum(numbers.double().abs() / 16, scale / 2**10)
    return half.expand(numbers.shape) * (1 + 1e-5) + 2.0**-100


@many
@given(
    kind=KINDS,
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    size=st.sampled_from([1, 8, 24, 64]),
    spread=st.sampled_from([0, 4, 70]),  # of magnitudes, powers of ten
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_what_is_read_lies_within_half_a_step_of_what_was_written(
    kind: Kind, lengths: list[int], kv_heads: int, size: int, spread: int, dtype: torch.dtype, seed: int
) -> None:
    """Zeros stay zeros, and a head with a number that is not finite is no number, alone."""
    torch.manual_seed(seed)
    keys, values = (states_of(sum(lengths), kv_heads, size, spread, dtype) for _ in range(2))
    keys[seed % len(keys), seed % kv_heads] = 0
    values[seed % len(keys), seed % kv_heads, seed % size] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    pages = pages_of(lengths, kv_heads, size, kind)
    filled(pages, lengths, keys, values)
    read = pages.read(pages.table.long(), torch.float32)
    for got, wanted in zip(read, (keys, values), strict=True):
        rows = got.transpose(2, 3).flatten(1, 2)  # [R, W T, H, D]
        got = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        broken = ~wanted.isfinite().all(dim=-1)
        assert torch.equal(got.isnan().all(dim=-1), broken) and torch.equal(got.isnan().any(dim=-1), broken)
        far = (got.double() - wanted.double()).abs()[~broken]
        assert (far <= half_step(wanted, kind)[~broken]).all()
        assert (got[~broken][wanted[~broken] == 0] == 0).all()


@many
@given(
    kind=KINDS,
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([8, 24, 64, 128]),
    spread=st.sampled_from([0, 2]),
    seed=st.integers(0, 999),
)
def test_attention_over_codes_is_near_that_over_numbers(
    kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, spread: int, seed: int
) -> None:
    """Within what follows from half a step: scores move by |q| times that of their key, so that every weight changes by
    at most a factor of e^2s, and values by that of their own."""
    torch.manual_seed(seed)
    keys, values = (states_of(sum(lengths), kv_heads, size, spread) for _ in range(2))
    queries = torch.randn(len(lengths), kv_heads * group, size).to(DEVICE)
    pages = pages_of(lengths, kv_heads, size, kind)
    filled(pages, lengths, keys, values)
    scaling = size**-0.5 / float(keys.abs().max())
    slots = torch.arange(len(lengths), device=DEVICE)
    depths = torch.ones(len(lengths), dtype=torch.int32, device=DEVICE)
    lanes = Lanes(slots, torch.tensor(lengths, device=DEVICE) - 1, depths, None)
    got = reference.attend(queries, pages, lanes, 0, scaling)
    first = 0
    for row, length in enumerate(lengths):
        key, value = (states[first : first + length].double() for states in (keys, values))
        first += length
        for head in range(kv_heads * group):
            own = head // group
            query = queries[row, head].double()
            weights = (key[:, own] @ query * scaling).softmax(dim=0)
            moved = (half_step(key[:, own], kind) * query.abs()).sum(dim=1).max() * scaling
            largest = value[:, own].abs().max()
            bound = half_step(value[:, own], kind).max() + (2 * moved).expm1() * largest
            far = (got[row, head].double() - weights @ value[:, own]).abs().max()
            assert far <= bound + 1e-5 * largest


def lanes_in_pages(
    lengths: list[int], kv_heads: int, group: int, size: int, kind: Kind, seed: int
) -> tuple[Tensor, Lanes, LayerPages]:
    """A new token of each row, one of which does not run the layer, over pages that hold the tokens before it."""
    torch.manual_seed(seed)
    dtype, count = torch.bfloat16 if CUDA else torch.float32, len(lengths)  # the interpreter has no bfloat16
    pages = pages_of(lengths, kv_heads, size, kind)
    keys, values = (states_of(sum(lengths), kv_heads, size, 1, dtype) for _ in range(2))
    filled(pages, lengths, keys, values)
    depths = torch.full((count,), 5, dtype=torch.int32, device=DEVICE)
    if count > 1:
        depths[seed % count] = 2
    rotary = torch.randn(2, count, size // 2).to(dtype).to(DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    lanes = Lanes(torch.arange(count, device=DEVICE), positions, depths, (rotary[0], rotary[1]))
    states = states_of(count, kv_heads * (group + 2), size, 2, dtype)
    states[seed % count, -1] = 0
    return states, lanes, pages


KERNEL_CASES: dict[str, Any] = {
    "kind": KINDS,
    "lengths": st.lists(st.integers(1, 150), min_size=1, max_size=4),
    "kv_heads": st.integers(1, 2),
    "group": st.sampled_from([1, 2, 5]),
    "size": st.sampled_from([8, 24, 64]),
    "seed": st.integers(0, 99),
}


@many
@given(**KERNEL_CASES)
def test_the_kernel_writes_the_codes_that_torch_writes(
    kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, seed: int
) -> None:
    """Or the next ones. Other tokens' codes stay, and nothing is written in a lane that does not run."""
    states, lanes, mine = lanes_in_pages(lengths, kv_heads, group, size, kind, seed)
    before, theirs = copied(mine), copied(mine)
    dense = torch.zeros(2, len(lengths), kv_heads, size, dtype=states.dtype, device=DEVICE)
    kernels.append(states, kv_heads * group, lanes.rotary, mine, lanes, 2, (dense[0], dense[1]))
    reference.append(states, kv_heads * group, lanes.rotary, theirs, lanes, 2)
    runs = lanes.depths > 2
    new = torch.zeros(mine.keys.shape[:3], dtype=torch.bool, device=DEVICE)
    places = mine.table[lanes.slots, lanes.positions // PAGE_TOKENS].long()[runs], (lanes.positions % PAGE_TOKENS)[runs]
    new[places[0], :, places[1]] = True
    new[0] = ~new[0]  # page 0 is nobody's
    assert mine.scales is not None and theirs.scales is not None and before.scales is not None
    pools = ((mine.keys, theirs.keys, before.keys), (mine.values, theirs.values, before.values))
    for (got, want, old), scales, numbers in zip(
        pools, zip(mine.scales, theirs.scales, strict=True), dense, strict=True
    ):
        assert torch.equal(got.float()[~new], old.float()[~new])
        torch.testing.assert_close(scales[0][1:], scales[1][1:], rtol=2**-7 if CUDA else 1e-5, atol=0)
        if kind == "int8":
            assert ((got.float() - want.float()).abs() <= 1)[1:].all()
        else:
            far, codes = (got.float() - want.float()).abs(), want.float().abs()
            # Triton's interpreter loses the carry of fractions that round up to a power of two
            known = torch.ones_like(codes, dtype=torch.bool) if CUDA else codes.log2() % 1 != 0
            assert (far <= (codes / 8).clamp(min=2**-9))[1:][known[1:]].all()
        if kind == "int8" or CUDA:
            read = got.float() * scales[0][..., None]
            written = read[places[0], :, places[1]].double()
            assert ((written - numbers[runs].double()).abs() <= half_step(numbers[runs], kind) * (1 + 1e-3)).all()


@many
@given(splits=st.builds(Splits, st.sampled_from([1, 2, 5]), st.sampled_from([1, 64, 128])), **KERNEL_CASES)
def test_the_kernel_attends_over_codes_as_torch_does(
    splits: Splits, kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, seed: int
) -> None:
    """Also where page 0 holds what is no number; and a lane's result is the same bits whatever lanes are beside it."""
    states, lanes, pages = lanes_in_pages(lengths, kv_heads, group, size, kind, seed)
    queries = torch.randn(len(lengths), kv_heads * group, size).to(states.dtype).to(DEVICE)
    keys, values = pages.read(torch.arange(len(pages.keys)).to(DEVICE), torch.float32)
    scaling, largest = 1 / float(keys.abs().max()), float(values.abs().max())
    want = reference.attend(queries, pages, lanes, 2, scaling)
    assert pages.scales is not None
    for scales in pages.scales:
        scales[0] = torch.nan
    got = kernels.attend(queries, pages, lanes, 2, scaling, splits)
    runs = lanes.depths > 2
    wide = 2**-4 if CUDA else 1e-5
    torch.testing.assert_close(got[runs] / largest, want[runs] / largest, rtol=wide, atol=wide)
    for lane in runs.nonzero()[:, 0].tolist():
        alone = kernels.attend(queries[lane : lane + 1], pages, lanes.at(slice(lane, lane + 1)), 2, scaling, splits)
        assert torch.equal(alone[0], got[lane])


def engine_of(decoder: Decoder, schedule: Schedule, kind: Kind | None, pages: int = 4000, **how: Any) -> GpuEngine:
    itemsize = 1 if kind else decoder.dtype.itemsize
    budget = pages * page_bytes(decoder.kv_heads, decoder.head_dim, itemsize)
    return GpuEngine(decoder, schedule, STOP, budget_bytes=budget, **{"max_rows": 5, "kv_cache": kind, **how})


def answers(engine: GpuEngine, rows: list[Request], scheduler: str = "refill", **how: Any) -> list[list[int]]:
    done = generate(engine, rows, budget_bytes=2**40, max_rows=engine.max_rows, scheduler=scheduler, **how)
    assert engine._run is not None and engine._run.cache.free == engine.pages
    assert all(one.error is None for one in done)
    return [list(one.token_ids) for one in done]


def same(family: str, schedule: Schedule, rows: list[Request], kind: Kind, got: list[list[int]], ties: int = 1) -> None:
    """The oracle's tokens; in at most so many rows a number lay between two codes, and both tokens are as likely."""
    library = Decoder(tiny_model(family))
    wanted = [rounded_answer(library, schedule, row, STOP, kind) for row in rows]
    apart = [place for place, (one, want) in enumerate(zip(got, wanted, strict=True)) if one != want]
    assert len(apart) <= ties
    for place in apart:
        one, want = got[place], wanted[place]
        at = next(number for number, pair in enumerate(zip(one, want, strict=False)) if pair[0] != pair[1])
        logits = rounded_logits(library, schedule, rows[place].prompt_ids, want[:at], kind)[-1]
        assert rows[place].sampling.temperature or abs(float(logits[one[at]] - logits[want[at]])) < 0.02 * logits.std()


def test_the_oracle_without_rounding_is_the_uncached_one() -> None:
    for family, spec in (("llama", 1), ("opt", 3), ("olmo2", 7)):
        library, schedule = Decoder(tiny_model(family)), SPECS[spec].build(LAYERS)
        rows = requests(6, seed=3)
        got = [rounded_answer(library, schedule, row, STOP, None) for row in rows]
        assert got == oracle_answers(library, schedule, rows, STOP, got)


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", FUSED)
def test_logits_are_near_those_of_a_whole_cache(family: str, kind: Kind) -> None:
    library = Decoder(tiny_model(family))
    for spec, row in itertools.product((0, 1), requests(3, seed=7)):
        schedule = SPECS[spec].build(LAYERS)
        response = [(5 * place) % 90 + 3 for place in range(20)]
        whole = oracle_logits_each(library, schedule, row.prompt_ids, response)
        found = rounded_logits(library, schedule, row.prompt_ids, response, kind)
        torch.testing.assert_close(found[0], whole[0], rtol=1e-4, atol=1e-5)  # of the prompt's own pass
        error = (found - whole).square().mean().sqrt() / whole.std()
        assert 0 < error < BOUNDS[kind], float(error)


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", FUSED)
def test_greedy_rows_equal_the_oracle(family: str, kind: Kind, scheduler: str) -> None:
    rows = requests(9, seed=3)
    engine = engine_of(fused(family), SCHEDULE, kind)
    got = answers(engine, rows, scheduler)
    assert engine._run is not None and engine._run.cache.memory.keys.dtype == DTYPES[kind]
    same(family, SCHEDULE, rows, kind, got)


@settings(max_examples=15, deadline=None)
@given(
    schedule=any_schedule(),
    kind=KINDS,
    max_rows=st.integers(1, 9),
    read_every=st.integers(1, 6),
    pages=st.sampled_from([4000, 90]),
    scheduler=st.sampled_from(["lock_step", "refill"]),
    seed=st.integers(0, 99),
)
def test_what_a_row_draws_hangs_on_no_other(
    schedule: Schedule, kind: Kind, max_rows: int, read_every: int, pages: int, scheduler: str, seed: int
) -> None:
    """Greedy and sampled rows, with others beside them, preempted or not: each is its own oracle's."""
    rows = [
        Request(row.prompt_ids, row.sampling.merged(UNPENALIZED), row.key) for row in requests(7, seed, sampled=True)
    ]
    engine = engine_of(fused("llama"), schedule, kind, pages, max_rows=max_rows, read_every=read_every)
    same("llama", schedule, rows, kind, answers(engine, rows, scheduler))


def test_preempted_rows_come_to_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for the longest row and little more, and rows admitted as if none in flight would grow."""
    found: list[int] = []
    take = GpuEngine.take_preempted

    def counted(engine: GpuEngine) -> list[int]:
        tickets = take(engine)
        found.extend(tickets)
        return tickets

    def trusting(engine: GpuEngine, waiting: Sequence[Request]) -> int:
        assert engine._run is not None
        needed = [row_pages(SCHEDULE, len(one.prompt_ids), 6, 4) for one in waiting]
        return sum(total <= engine._run.cache.free for total in itertools.accumulate(needed))

    monkeypatch.setattr(GpuEngine, "take_preempted", counted)
    monkeypatch.setattr(GpuEngine, "admission_estimate", trusting)
    rows = requests(16, 1, most_new=40)
    rows = [Request(row.prompt_ids, row.sampling.merged({"ignore_eos": True}), row.key) for row in rows]
    needed = [row_pages(SCHEDULE, len(row.prompt_ids), row.sampling.max_new_tokens + 8, 4) for row in rows]
    engine = engine_of(fused("llama"), SCHEDULE, "int8", max(needed) + 3, max_rows=8)
    same("llama", SCHEDULE, rows, "int8", answers(engine, rows))
    assert found


@pytest.mark.parametrize("kind", LIMITS)
def test_copies_of_a_shared_beginning_are_rounded_alike(kind: Kind) -> None:
    rows = with_prefix(11, seed=1)
    for prefix in (PREFIX, ()):
        same("llama", SCHEDULE, rows, kind, answers(engine_of(fused("llama"), SCHEDULE, kind), rows, prefix=prefix))


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", ["llama", "opt-post-norm"])
def test_exact_mode_has_full_depths_answers_over_the_same_cache(family: str, kind: Kind) -> None:
    full = ScheduleSpec().build(LAYERS)
    rows = [Request(row.prompt_ids, row.sampling.merged(UNPENALIZED), row.key) for row in requests(9, 3, sampled=True)]
    decoder = fused(family)
    engine = GpuExactEngine(
        decoder, full, STOP, drafter=Drafter(decoder, SCHEDULE), budget_bytes=2**22, max_rows=48, kv_cache=kind
    )
    same(family, full, rows, kind, answers(engine, rows))
    assert engine.take_stats().accepted_tokens > 0


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([8, 64, 80, 128]), KINDS)
def test_the_bytes_of_pages_are_those_of_codes_and_scales(pages: int, kv_heads: int, size: int, kind: Kind) -> None:
    shape: dict[str, Any] = {
        "kv_heads": kv_heads,
        "head_dim": size,
        "dtype": DTYPES[kind],
        "device": torch.device("cpu"),
    }
    cache = PagedCache(SCHEDULE, 2, pages, 20, 20, **shape)
    assert cache.bytes == (pages + 1) * page_bytes(kv_heads, size, 1)
    assert page_bytes(kv_heads, size, 1) == PAGE_TOKENS * token_bytes(kv_heads, size, 1)


def test_the_same_memory_holds_almost_twice_the_rows() -> None:
    """Llama-3-8B's pages; and an engine admits by its own bytes."""
    assert (page_bytes(8, 128, 2), page_bytes(8, 128, 1)) == (65_536, 33_792)
    decoder = fused("llama")
    plain, codes = (
        GpuEngine(decoder, SCHEDULE, STOP, budget_bytes=2**18, max_rows=99, kv_cache=kind) for kind in (None, "int8")
    )
    ratio = 4 * decoder.head_dim / (decoder.head_dim + 4)  # float32 against codes and a scale
    assert codes.pages == pytest.approx(ratio * plain.pages, rel=0.01)
    assert codes.row_bytes(20, 14) * ratio == plain.row_bytes(20, 14) and codes.token_bytes * ratio == plain.token_bytes
    rows = [Request([5] * 60, requests(1, 1)[0].sampling.merged({"max_new_tokens": 40}), key) for key in range(99)]
    admitted = []
    for engine in (plain, codes):
        engine.open(99, 60, 40)
        admitted.append(engine.admission_estimate(rows))
        assert admitted[-1] == engine.pages // row_pages(SCHEDULE, 60, 48, 4)
        engine.close()
        assert engine.at(ScheduleSpec().build(LAYERS)).token_bytes == engine.token_bytes
    assert 1.9 * admitted[0] < admitted[1] < 99


@torch.inference_mode()
def test_the_definition_is_what_pages_hold() -> None:
    """The oracle's rounding, in float64, against the codes' own."""
    torch.manual_seed(0)
    for kind in LIMITS:
        keys, values = states_of(40, 3, 24, 2), states_of(40, 3, 24, 2)
        pages = pages_of([40], 3, 24, kind)
        filled(pages, [40], keys, values)
        got = pages.read(pages.table.long(), torch.float32)[0][0].transpose(1, 2).flatten(0, 1)[:40]
        torch.testing.assert_close(got.double().cpu(), rounded(keys.cpu(), kind), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({}, "only the paged engine on a GPU has it; leave kv_cache out"),
        ({"engine": "library"}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"dtype": "float16"}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"compile": True}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"kv_cache": "int4"}, "kv_cache = 'int4': must be one of int8, fp8"),
    ],
)
def test_a_generator_without_such_a_cache_says_so_before_it_loads(
    tmp_path: Path, how: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = pytest.importorskip("tiny_checkpoint", reason="what makes one is not installed", exc_type=ImportError)
    checkpoint = tiny.tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(build, "load_decoder", lambda *given, **more: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=re.escape(line)):
        Generator(str(checkpoint), **{"device": "cpu", "kv_cache": "int8", **how})


def test_a_gpu_without_fp8_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    plain = build.EngineSettings("paged", "bfloat16", "cuda", False, None, None, False)
    build.check_cache(replace(plain, kv_cache="int8"), torch.device("cuda"), paged=True)
    with pytest.raises(UserError, match=r"^kv_cache = 'fp8' needs a GPU of compute capability 8\.9 .*"):
        build.check_cache(replace(plain, kv_cache="fp8"), torch.device("cuda"), paged=True)
