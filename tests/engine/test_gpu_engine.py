"""The GPU's engine without a GPU: pages, prompts one behind another, a device that is ahead of its host; in fp32, token
for token against the uncached oracle. Its kernels and graphs have tests of their own."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import PREFIX, SPECS, STOP, any_schedule, cases_of, requests, with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers
from tiny_models import LAYERS, MODELS, WINDOWLESS, tiny_model
from transformers import AutoConfig

from actors.engine.checkpoint.families import has_pages
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.gpu import prefill, prompts, reference
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import PAGE_TOKENS, PagedCache, page_bytes, row_pages
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request, SamplingParams

FUSED = ["llama", "opt", "opt-post-norm", "mistral-full", "qwen2", "qwen3", "olmo2", *WINDOWLESS]
CASES = cases_of(FUSED)
WINDOWED = ["mistral", "qwen2-window", "phi3", "smollm3"]  # of the same families
SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


def fused(family: str) -> Decoder:
    decoder = Decoder(tiny_model(family))
    assert decoder.prepare_for_gpu(reference)
    return decoder


def bytes_of(decoder: Decoder, pages: int) -> int:
    return pages * page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)


def engine_of(decoder: Decoder, schedule: Schedule, pages: int = 4000, max_rows: int = 5, **how: Any) -> GpuEngine:
    return GpuEngine(decoder, schedule, STOP, budget_bytes=bytes_of(decoder, pages), max_rows=max_rows, **how)


def answers(engine: GpuEngine, rows: list[Request], scheduler: str = "refill", **how: Any) -> list[tuple[int, ...]]:
    budget = bytes_of(engine.decoder, engine.pages)
    done = generate(engine, rows, budget_bytes=budget, max_rows=engine.max_rows, scheduler=scheduler, **how)
    assert engine._run is not None and engine._run.cache.free == engine.pages  # every page has come back
    assert all(one.error is None for one in done)
    return [one.token_ids for one in done]


def test_families_without_fused_layers_are_left_alone() -> None:
    taken = {family for family in {**MODELS, **WINDOWLESS} if Decoder(tiny_model(family)).prepare_for_gpu(reference)}
    assert taken == set(FUSED)
    turns = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not has_pages(AutoConfig.for_model("llama", **{**MODELS["llama"][1], "rope_parameters": turns}))


@pytest.mark.parametrize("family", MODELS)
def test_tables_of_embeddings_add_up_to_them(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    tables = decoder.family.embeddings(decoder.model)
    assert (tables is not None) == ((family in FUSED and family != "opt-post-norm") or family in WINDOWED)
    if tables is not None:
        ids = torch.tensor([[3, 9, 4, 90]])
        embedded, _ = decoder.embed(ids, torch.arange(4)[None])
        assert torch.equal(embedded[0], tables[0][ids[0]] + (0 if tables[1] is None else tables[1][:4]))


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize(("family", "spec"), CASES)
def test_greedy_rows_equal_the_oracle(family: str, spec: int, scheduler: str) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(13, seed=spec)
    library = Decoder(tiny_model(family))
    got = answers(engine_of(fused(family), schedule), rows, scheduler)
    assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)


@settings(max_examples=15, deadline=None)
@given(
    any_schedule(),
    st.integers(0, 99),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from(["lock_step", "refill"]),
)
def test_what_a_row_draws_hangs_on_no_other(
    schedule: Schedule, seed: int, max_rows: int, read_every: int, scheduler: str
) -> None:
    """Greedy and sampled rows, with and without penalties, however many are in flight and however seldom the host
    polls."""
    rows = requests(9, seed, sampled=True)
    library = Decoder(tiny_model("llama"))
    engine = engine_of(fused("llama"), schedule, max_rows=max_rows, read_every=read_every)
    got = answers(engine, rows, scheduler)
    assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
    stats = engine.take_stats()
    assert stats.generated_tokens == sum(map(len, got))
    assert stats.decode_steps == sum(len(one) - 1 for one in got)
    assert stats.layer_steps == sum(schedule.layer_steps(len(one) - 1) for one in got)


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tickets of preempted rows, from now on; rows are admitted as if none in flight would grow."""
    preempted: list[int] = []
    take = GpuEngine.take_preempted

    def noted(engine: GpuEngine) -> list[int]:
        found = take(engine)
        preempted.extend(found)
        return found

    def trusting(engine: GpuEngine, waiting: Sequence[Request], prefixes: Any) -> int:
        assert engine._run is not None
        needed = [row_pages(SCHEDULE, len(one.prompt_ids), 6, 4) for one in waiting]
        return sum(total <= engine._run.cache.free for total in itertools.accumulate(needed))

    monkeypatch.setattr(GpuEngine, "take_preempted", noted)
    monkeypatch.setattr(GpuEngine, "admission_estimate", trusting)
    return preempted


def largest(rows: Sequence[Request]) -> int:
    """Pages of the largest row."""
    return max(row_pages(SCHEDULE, len(row.prompt_ids), row.sampling.max_new_tokens + 8, 4) for row in rows)


def test_rows_that_outgrow_the_pages_are_preempted_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for the longest row and little more."""
    preempted = preemptions(monkeypatch)
    library, decoder = Decoder(tiny_model("llama")), fused("llama")
    for seed in range(4):
        rows = requests(25, seed, most_new=40, longest=20)
        rows = [Request(row.prompt_ids, row.sampling.merged({"ignore_eos": seed % 2 == 0}), row.key) for row in rows]
        engine = engine_of(decoder, SCHEDULE, pages=largest(rows) + 3 * seed, max_rows=8)
        got = answers(engine, rows)
        assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP, got)
    assert preempted


def test_more_rows_are_in_flight_than_would_fit_at_full_length() -> None:
    rows = [Request(row.prompt_ids, SamplingParams(max_new_tokens=40)) for row in requests(60, 3)]
    decoder = fused("llama")
    each = row_pages(SCHEDULE, 20, 48, 4)
    engine = engine_of(decoder, SCHEDULE, pages=4 * each, max_rows=60)
    most = 0
    step = engine.step

    def watched(**how: Any) -> Any:
        nonlocal most
        most = max(most, len(engine.rows))
        return step(**how)

    engine.step = watched  # type: ignore[method-assign]
    library = Decoder(tiny_model("llama"))
    got = answers(engine, rows)
    assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP, got)
    assert most > 4


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("spec", [0, 1, 3])
def test_a_shared_beginning_changes_no_token(spec: int, scheduler: str) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = with_prefix(13, seed=1)
    library = Decoder(tiny_model("llama"))
    engine = engine_of(fused("llama"), schedule)
    for prefix in (PREFIX, PREFIX, PREFIX[:16], PREFIX[:9]):
        got = answers(engine, rows, scheduler, prefix=prefix)
        assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
    whole = sum(len(row.prompt_ids) for row in rows)
    stats = engine.take_stats()
    assert stats.prompt_tokens < 4 * whole and stats.padded_prompt_tokens == stats.prompt_tokens


def test_a_new_beginning_is_computed_when_the_last_one_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is planned for the keys and values of one."""
    engine, made, alive = engine_of(fused("llama"), SCHEDULE), [], []

    class Noted(prompts.PrefixKeys):
        def __init__(self) -> None:
            super().__init__()
            gc.collect()
            alive.append(sum(one() is not None for one in made))
            made.append(weakref.ref(self))

    monkeypatch.setattr(prefill, "PrefixKeys", Noted)
    for beginning in (PREFIX, PREFIX[:16], PREFIX[:9]):
        answers(engine, with_prefix(4, seed=1), prefix=beginning)
    assert alive == [0, 0, 0]


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        *((family, tokens) for family in ("llama", "opt") for tokens in (1, 5, 8)),
        *((family, 5 + 3 * (number % 2)) for number, family in enumerate(FUSED[2:])),
    ],
)
def test_long_prompts_in_chunks_change_no_token(tokens: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a shared beginning, which is a long prompt itself."""
    for module in (prompts, prefill):
        monkeypatch.setattr(module, "CHUNK_TOKENS", tokens)
    rows = with_prefix(13, seed=4)
    library = Decoder(tiny_model(family))
    engine = engine_of(fused(family), SCHEDULE)
    for prefix in ((), PREFIX):
        got = answers(engine, rows, prefix=prefix)
        assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP, got)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("prompt", ["full", "first"])
def test_rows_in_flight_step_with_each_pass(prompt: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ride along, also where the host writes masks. All newcomers come at once if none is in flight."""
    for module in (prompts, prefill):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 20)
    stops = tuple(range(40, 80)) if masked else ()  # more than the GPU checks
    rows = [
        Request(
            row.prompt_ids,
            SamplingParams(
                max_new_tokens=3 + 5 * (place % 4),
                min_new_tokens=3 + 5 * (place % 4),
                ignore_eos=True,
                stop_token_ids=stops,
            ),
        )
        for place, row in enumerate(requests(40, 3))
    ]
    schedule = ScheduleSpec(speedup=2, horizon=6, prompt=prompt).build(LAYERS)
    engine = engine_of(fused("llama"), schedule, max_rows=16)
    events: list[tuple[int, int]] = []  # rows in flight, tokens that come
    admit = engine.admit

    def watched(wanted: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        busy = len(engine.rows)
        events.append((busy, sum(len(one.prompt_ids) for one in wanted)))
        ready = busy > 0 and all(row.position > 0 for row in engine.rows)
        tickets = admit(wanted, prefix)
        assert engine.stepped == ready
        return tickets

    def stepped(*, last: bool = False) -> Any:
        events.append((0, 0))
        return step(last=last)

    step = engine.step
    monkeypatch.setattr(engine, "admit", watched)
    monkeypatch.setattr(engine, "step", stepped)
    library = Decoder(tiny_model("llama"))
    got = answers(engine, rows)
    assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
    longest = max(len(row.prompt_ids) for row in rows)
    assert events[0][0] == 0 and events[0][1] > 20 + longest
    late = [place for place, (busy, _) in enumerate(events) if busy]
    assert len(late) > 4 and all(events[place][1] <= max(20, longest) for place in late)
    assert not all(events[place - 1] == (0, 0) for place in late)


@pytest.mark.parametrize("many", [1, 100, 10**9])
def test_tokens_are_drawn_the_same_in_any_number_of_parts(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "DRAWN_NUMBERS", many)
    ways: list[dict[str, Any]] = [{"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "min_new_tokens": 2}, {}]
    rows = [
        Request(row.prompt_ids, row.sampling.merged(ways[place % 3]), row.key)
        for place, row in enumerate(requests(13, seed=7))
    ]
    library = Decoder(tiny_model("llama"))
    got = answers(engine_of(fused("llama"), SCHEDULE, max_rows=13), rows)
    assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP, got)


def test_several_answers_to_a_prompt_share_its_pass() -> None:
    prompt = [5, 6, 7, 8]
    rows = [Request(prompt, SamplingParams(max_new_tokens=9, temperature=1.0), key) for key in range(6)]
    library = Decoder(tiny_model("opt"))
    engine = engine_of(fused("opt"), SCHEDULE, max_rows=6)
    got = answers(engine, rows)
    assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP, got)
    assert engine.take_stats().prompt_tokens == 4


def test_rows_with_masks_come_beside_others() -> None:
    trie = ChoiceTrie([[7, 8], [7, 9, 3], [20]], 2)
    bound = Request([9, 8, 7], SamplingParams(max_new_tokens=5), 1, constraint=trie)
    rows = [*requests(6, seed=4), bound, *requests(5, 8)]
    rows.insert(8, Request([4, 5], SamplingParams(max_new_tokens=7, logprobs=2), 3))
    decoder = Decoder(tiny_model("llama"))
    want = [
        generate(Engine(decoder, SCHEDULE, STOP), [row], budget_bytes=2**40, max_rows=1, scheduler="refill")[0]
        for row in rows
    ]
    engine = engine_of(fused("llama"), SCHEDULE, max_rows=3)
    budget = bytes_of(engine.decoder, engine.pages)
    got = generate(engine, rows, budget_bytes=budget, max_rows=3, scheduler="refill")
    for one, other in zip(got, want, strict=True):
        assert (one.token_ids, one.finish_reason, one.choice) == (other.token_ids, other.finish_reason, other.choice)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        assert (one.logprobs is None) == (other.logprobs is None)


@pytest.mark.parametrize("least", [0, 3])
def test_more_stop_tokens_than_the_gpu_checks(least: int) -> None:
    stops = tuple(range(40, 80))
    changes = {"stop_token_ids": stops, "max_new_tokens": 12, "min_new_tokens": least}
    rows = [Request(row.prompt_ids, row.sampling.merged(changes)) for row in requests(6, seed=2)]
    library = Decoder(tiny_model("llama"))
    got = answers(engine_of(fused("llama"), SCHEDULE), rows)
    assert [list(tokens) for tokens in got] == oracle_answers(library, SCHEDULE, rows, STOP | set(stops), got)


def test_memory_that_runs_out_costs_no_row(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first cache does not fit; the next has a twelfth less of the pages, for the rest of the process."""
    rows = [*requests(9, seed=5), Request([5] * 40, SamplingParams(max_new_tokens=20))]
    decoder, library = fused("llama"), Decoder(tiny_model("llama"))
    needed = [row_pages(SCHEDULE, len(row.prompt_ids), row.sampling.max_new_tokens + 8, 4) for row in rows]
    engine = engine_of(decoder, SCHEDULE, pages=2 * max(needed) - 4)
    made = PagedCache.__init__
    left = 1

    def short(cache: PagedCache, *given: Any, **more: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made(cache, *given, **more)

    monkeypatch.setattr(PagedCache, "__init__", short)
    budget = bytes_of(decoder, engine.pages)
    got = generate(engine, rows, budget_bytes=budget, max_rows=5, scheduler="refill")
    tokens = [list(completion.token_ids) for completion in got]
    assert tokens == oracle_answers(library, SCHEDULE, rows, STOP, tokens)
    first, kept = 2 * max(needed) - 4, engine.pages
    assert engine.stats.out_of_memory == 1 and 0.9 * first - 1 <= kept < 0.95 * first
    (line,) = caplog.messages
    assert line.startswith("GPU memory ran out: the cache shrinks from ") and "rest of this process" in line
    got = generate(engine, rows, budget_bytes=budget, max_rows=5, scheduler="refill")  # the next shard
    assert engine.stats.out_of_memory == 1 and engine.pages == kept and engine.stats.batches == 2
    assert [list(completion.token_ids) for completion in got] == tokens


def test_memory_that_runs_out_again_and_again_halves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers for more than two rows never fit: the cache shrinks each time, and the rows in flight with it."""
    rows = requests(9, seed=5)
    decoder, library = fused("llama"), Decoder(tiny_model("llama"))
    engine = engine_of(decoder, SCHEDULE)
    made, sizes = PagedCache.__init__, []

    def short(cache: PagedCache, schedule: Schedule, slots: int, *given: Any, **more: Any) -> None:
        sizes.append(slots)
        if slots > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made(cache, schedule, slots, *given, **more)

    monkeypatch.setattr(PagedCache, "__init__", short)
    got = generate(engine, rows, budget_bytes=2**40, max_rows=5, scheduler="refill")
    tokens = [list(completion.token_ids) for completion in got]
    assert tokens == oracle_answers(library, SCHEDULE, rows, STOP, tokens)
    assert sizes == [5, 5, 2] and engine.stats.out_of_memory == 2


@pytest.mark.parametrize("family", FUSED)
def test_the_layers_can_be_called_as_the_librarys(family: str) -> None:
    """By the plain engine, padded and with slots."""
    rows = requests(9, seed=2)
    decoder, library = fused(family), Decoder(tiny_model(family))
    got = generate(Engine(decoder, SCHEDULE, STOP), rows, budget_bytes=2**40, max_rows=4)
    tokens = [list(completion.token_ids) for completion in got]
    assert tokens == oracle_answers(library, SCHEDULE, rows, STOP, tokens)


def test_schedules_take_turns_on_the_same_pages() -> None:
    rows = requests(9, seed=8)
    library = Decoder(tiny_model("llama"))
    first = engine_of(fused("llama"), SCHEDULE)
    slower = ScheduleSpec().build(LAYERS)
    for _ in range(2):
        for schedule in (SCHEDULE, slower):
            engine = first.at(schedule)
            assert isinstance(engine, GpuEngine) and engine is first.at(schedule)
            got = answers(engine, rows)
            assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
    second = first.at(slower)
    assert isinstance(second, GpuEngine) and second._run is not None and first._run is not None
    assert second._run.cache.memory is first._run.cache.memory
    held = weakref.ref(second._run.cache.memory.keys)
    assert first.release_memory()
    assert held() is None, "the pages are gone, whoever has used them"
    assert answers(second, rows) == [tuple(one) for one in got]
    assert second._run.cache.memory is second._pool.memory


def test_an_engine_goes_when_nobody_refers_to_it() -> None:
    """At once, with all its pages: no garbage collector comes in time for the next one."""
    engine = engine_of(fused("llama"), SCHEDULE)
    other = engine.at(ScheduleSpec().build(LAYERS))
    assert isinstance(other, GpuEngine) and other.at(other.schedule) is other
    answers(other, requests(3, seed=1))
    assert other._run is not None
    gone = weakref.ref(engine), weakref.ref(other), weakref.ref(other._run.cache.memory.keys)
    gc.disable()
    try:
        del engine, other
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


def test_finish_reasons_and_log_probabilities_are_the_other_engines() -> None:
    rows = requests(14, seed=6)
    rows = [Request(row.prompt_ids, row.sampling.merged({"temperature": 0.9}), row.key) for row in rows]
    want = generate(Engine(Decoder(tiny_model("llama")), SCHEDULE, STOP), rows, budget_bytes=2**40, max_rows=5)
    engine = engine_of(fused("llama"), SCHEDULE)
    got = generate(engine, rows, budget_bytes=bytes_of(engine.decoder, engine.pages), max_rows=5)
    for one, other in zip(got, want, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
    assert len({one.finish_reason for one in got}) == 2


@settings(max_examples=60, deadline=None)
@given(any_schedule(), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50)), min_size=1, max_size=6), st.data())
def test_pages_hold_what_a_row_will_read_and_no_more(
    schedule: Schedule, shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The law of the cache: at position t a layer that runs has pages for all places up to the row's last one, no two
    rows or layers share a page, and a layer that will not run has none."""
    most_new = max(new for _, new in shapes)
    pages = sum(row_pages(schedule, prompt, new + 6, 3) for prompt, new in shapes) + data.draw(st.integers(0, 5))
    shape = {"kv_heads": 1, "head_dim": 2, "dtype": torch.float32, "device": torch.device("cpu")}
    cache = PagedCache(schedule, len(shapes), pages, max(p for p, _ in shapes), most_new, **shape)  # type: ignore[arg-type]
    rows = list(range(len(shapes)))
    positions = [0] * len(shapes)
    while rows:
        assert cache.grow(rows, [shapes[row][0] for row in rows], [positions[row] for row in rows], 3)
        held = []
        for row in rows:
            prompt, position = shapes[row][0], positions[row]
            for layer in range(schedule.num_layers):
                ends = position >= schedule.uses(layer, most_new)
                count = 0 if ends else prompt + min(position + 3, schedule.uses(layer, most_new))
                needed = -(-count // PAGE_TOKENS)
                assert cache._counts[layer, row] <= max(needed, -(-(prompt + position + 3) // PAGE_TOKENS)) * (not ends)
                assert cache._counts[layer, row] >= needed
                held += cache.table[layer, row, : cache._counts[layer, row]].tolist()
        assert len(set(held)) == len(held) and 0 not in held and cache.free == pages - len(held)
        positions = [position + 3 for position in positions]
        over = [row for row in rows if positions[row] >= shapes[row][1] - 1]
        cache.release(over)
        rows = [row for row in rows if row not in over]
    assert cache.free == pages


def test_a_budget_without_a_page_is_told() -> None:
    with pytest.raises(ValueError, match="no page of cache fits the budget"):
        engine_of(fused("llama"), SCHEDULE, pages=0).open(1, 5, 5)


def test_the_table_of_the_host_is_the_devices() -> None:
    cache = PagedCache(
        SCHEDULE, 3, 500, 30, 20, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
    )
    assert cache.grow([2, 0], [30, 7], [0, 0], 4)
    assert cache.grow([2, 0], [30, 7], [5, 9], 4)
    assert np.array_equal(cache.table.numpy(), cache._table) and cache.table.any()
