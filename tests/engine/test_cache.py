from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.cache import SkipCache, SlotShape, compaction
from actors.engine.schedule.schedule import Schedule, ScheduleSpec

SCHEDULE = ScheduleSpec(max_depth=4, min_depth=2, horizon=3).build(6)  # depths 4, 3, 2; order 0 5 4 3 2 1


def make(shape: SlotShape, windows: list[int | None]) -> SkipCache:
    return SkipCache(shape, kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), windows=windows)


def test_slots_follow_the_schedule() -> None:
    # layers 0 and 5 run at all 7 inputs, 4 at the first two, 3 at the first, 1 and 2 never
    assert SlotShape(SCHEDULE, 1, 5, 8).slots == [12, 0, 0, 6, 7, 12]
    assert SlotShape(SCHEDULE, 1, 5, 1).slots == [0] * 6


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30))
def test_bytes_are_known_beforehand(rows: int, prompt_slots: int, max_new_tokens: int) -> None:
    shape = SlotShape(SCHEDULE, rows, prompt_slots, max_new_tokens)
    held = sum(keys.nbytes + values.nbytes for keys, values in filter(None, make(shape, [None] * 6).buffers))
    assert held == shape.bytes(2 * 2 * 4 * 4)


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


def test_moved_rows_take_their_keys_along() -> None:
    cache = make(SlotShape(SCHEDULE, 4, 5, 8), [None] * 6)
    cache.begin_prefill((2, 0, 1, 3), range(4))
    keys = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 5, 4)
    cache.update(keys, -keys, 5)
    cache.arrange((3, 1, 0))
    assert cache.buffers[5] is not None
    keys, values = cache.buffers[5]
    assert [keys[:3, 0, 0, 3].tolist(), values[:3, 1, 4, 3].tolist()] == [[3, 2, 1], [-3, -2, -1]]


@given(st.lists(st.integers(0, 11), min_size=1, max_size=5), st.integers(1, 14), st.integers(0, 11))
def test_a_step_sees_the_window_before_its_own_place(places: list[int], window: int, filled: int) -> None:
    """Keys hold their slot's number, so that what is returned tells which slots a row attends to."""
    cache = make(SlotShape(Schedule(2, (2,), (0, 1)), 5, 4, 9), [None, window])
    for place in range(max(filled, *places) + 1):  # a step may come after longer ones
        cache.begin_step([place] * 5)
        for layer in range(2):
            cache.update(torch.full((5, 2, 1, 4), float(place)), torch.zeros(5, 2, 1, 4), layer)
    cache.begin_step(places)
    own = torch.tensor(places, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 2, 1, 4)
    for layer, reach in enumerate((12, window)):
        for rows in range(1, len(places) + 1):
            keys, _ = cache.update(own[-rows:], own[-rows:], layer)
            mask = cache.mask(layer, rows)
            for row, place in enumerate(places[-rows:]):
                seen = keys[row, 0, :, 0] if mask is None else keys[row, 0, mask[row, 0, 0], 0]
                assert seen.tolist() == list(range(max(0, place - reach + 1), place + 1))
