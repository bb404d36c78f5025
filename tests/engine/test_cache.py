from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.cache import SkipCache, cache_bytes_per_row, cache_slots, compaction
from actors.engine.cpu.stack import NativeBuffers
from actors.engine.schedule.schedule import ScheduleSpec

SCHEDULE = ScheduleSpec(max_depth=4, min_depth=2, horizon=3).build(6)  # depths 4, 3, 2; order 0 5 4 3 2 1


def make(rows: int = 3, prompt_slots: int = 5, max_new_tokens: int = 8, has_places: bool = False) -> SkipCache:
    return SkipCache(
        SCHEDULE,
        rows,
        prompt_slots,
        max_new_tokens,
        kv_heads=2,
        head_dim=4,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=NativeBuffers() if has_places else None,
    )


def test_slots_follow_the_schedule() -> None:
    # layers 0 and 5 run at all 7 inputs, 4 at the first two, 3 at the first, 1 and 2 never
    assert cache_slots(SCHEDULE, 5, 8) == [12, 0, 0, 6, 7, 12]
    assert cache_slots(SCHEDULE, 5, 1) == [0] * 6


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30))
def test_bytes_are_known_beforehand(rows: int, prompt_slots: int, max_new_tokens: int) -> None:
    assert make(rows, prompt_slots, max_new_tokens).bytes == rows * cache_bytes_per_row(
        SCHEDULE, prompt_slots, max_new_tokens, token_bytes=2 * 2 * 4 * 2
    )


def test_layers_are_freed_after_their_last_use() -> None:
    cache = make()
    held = [cache.bytes]
    for position in (0, 1, 2):
        cache.free(position)
        held.append(cache.bytes)
    slots = [37, 37, 31, 24]
    assert held == [3 * 2 * 4 * 2 * 2 * count for count in slots]


@st.composite
def flights(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    positions = sorted(draw(st.lists(st.integers(0, 4), max_size=20)), reverse=True)
    return positions, [draw(st.booleans()) for _ in positions]


@given(flights())
def test_compaction_keeps_live_rows_oldest_first_and_moves_few(flight: tuple[list[int], list[bool]]) -> None:
    positions, alive = flight
    order = compaction(positions, alive)
    assert sorted(order) == [row for row, live in enumerate(alive) if live]
    kept = [positions[row] for row in order]
    assert kept == sorted(kept, reverse=True)
    moved = sum(source != target for target, source in enumerate(order))
    stable = [row for row, live in enumerate(alive) if live]
    assert moved <= sum(source != target for target, source in enumerate(stable))
    if len(set(positions)) <= 1:  # lock-step: a copy a hole at most
        assert moved <= alive.count(False)


def test_moving_rows_takes_their_keys_along() -> None:
    cache = make(rows=4)
    cache.begin_prefill(0, range(4))
    keys = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 5, 4)
    cache.update(keys, -keys, 5)
    cache.arrange((3, 1, 0))
    assert cache.buffers[5] is not None
    stored = cache.buffers[5][0][:3, 0, 0, 0].tolist(), cache.buffers[5][1][:3, 1, 4, 3].tolist()
    assert stored == ([3, 1, 0], [-3, -1, 0])


@given(st.data())
def test_rows_with_places_are_where_rows_without_would_be(data: st.DataObject) -> None:
    plain, placed = make(rows=5), make(rows=5, has_places=True)
    live: list[int] = []
    for number in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.integers(0, 5 - len(live)))
        if new:
            keys = torch.arange(10.0 * number, 10.0 * number + new).view(-1, 1, 1, 1).expand(-1, 2, 5, 4).bfloat16()
            plain.begin_prefill(len(live), range(new))
            plain.update(keys, -keys, 5)
            placed.begin_prefill(len(live), range(new), starts=5 * torch.arange(new + 1))
            buffers, places, _, _ = placed.joined_prompts(5)
            assert buffers is not None
            for buffer, states in zip(buffers, (keys, -keys), strict=True):
                buffer[places, :, :5] = states
        live += [10 * number + row for row in range(new)]
        order = data.draw(st.permutations(range(len(live))))[: data.draw(st.integers(0, len(live)))]
        plain.arrange(order)
        placed.arrange(order)
        live = [live[row] for row in order]
        if live:
            placed.begin_step([5] * len(live), torch.device("cpu"))
            places, *_ = placed.step_slots()
            assert plain.buffers[5] is not None and placed.buffers[5] is not None
            assert plain.buffers[5][0][: len(live), 1, 4, 3].tolist() == live
            assert placed.buffers[5][0][places, 1, 4, 3].tolist() == live
    grown = make(rows=5, has_places=True)
    grown.copy_rows(placed, len(live))
    assert grown.buffers[5] is not None and grown.buffers[5][0][: len(live), 0, 0, 0].tolist() == live


@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 14), st.integers(0, 11))
def test_a_step_sees_the_window_before_its_own_place(places: list[int], window: int, filled: int) -> None:
    """Keys hold their slot's number, so that what is returned tells which slots a row attends to."""
    schedule = ScheduleSpec().build(2)
    cache = SkipCache(
        schedule,
        5,
        4,
        9,
        kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        windows=[None, window],
    )
    for place in range(max(filled, *places) + 1):  # a step may come after longer ones
        cache.begin_step([place] * 5, torch.device("cpu"))
        for layer in range(2):
            cache.update(torch.full((5, 1, 1, 1), float(place)), torch.zeros(5, 1, 1, 1), layer)
    cache.begin_step(places, torch.device("cpu"))
    own = torch.tensor(places, dtype=torch.float32).view(-1, 1, 1, 1)
    for layer, reach in enumerate((12, window)):
        for rows in range(1, len(places) + 1):
            keys, _ = cache.update(own[-rows:], own[-rows:], layer)
            mask = cache.mask(layer, rows)
            for row, place in enumerate(places[-rows:]):
                seen = keys[row, 0, :, 0] if mask is None else keys[row, 0, mask[row, 0, 0], 0]
                assert seen.tolist() == list(range(max(0, place - reach + 1), place + 1))
