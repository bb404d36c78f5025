"""The law of shared pages: whatever rows come, grow and go, a page has the readers that are counted, and none is lost.

Answers of rows that share pages equal the oracle's in test_gpu_engine.py, test_gpu_exact.py and test_gpu_kv_cache.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import STOP, any_schedule, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers
from test_gpu_engine import answers, bytes_of, engine_of, fused
from tiny_models import LAYERS, tiny_model

from actors.engine import shared_prefixes
from actors.engine.decoder import Decoder
from actors.engine.gpu.admission import AdmissionEstimate
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import PAGE_TOKENS, PagedCache, row_pages
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request, SamplingParams

ROWS, AHEAD, MOST_NEW, LONGEST = 6, 3, 40, 120
PREFIXES = [tuple(range(tokens)) for tokens in (0, 9, 16, 37, 64)]  # of which 9 tokens fill no page
SCHEDULES = {
    "1x": ScheduleSpec(),
    "3x": ScheduleSpec(speedup=3, horizon=6),
    "prompt: first": ScheduleSpec(speedup=2, horizon=6, prompt="first"),
}


class Pool:
    """A cache, and the rows that are in flight: slot -> (tokens of the prompt, prefix, position)."""

    def __init__(self, schedule: Schedule, pages: int) -> None:
        self.schedule, self.pages = schedule, pages
        shape: dict[str, Any] = {"kv_heads": 1, "head_dim": 2, "dtype": torch.float32, "device": torch.device("cpu")}
        self.cache = PagedCache(schedule, ROWS, pages, LONGEST, MOST_NEW, **shape)
        self.rows: dict[int, tuple[int, tuple[int, ...], int]] = {}

    def admit(self, tokens: list[int], prefix: tuple[int, ...]) -> bool:
        free = [slot for slot in range(ROWS) if slot not in self.rows][: len(tokens)]
        prompts = [len(prefix) + own for own in tokens[: len(free)]]
        if not free or not self.cache.admit(free, prompts, AHEAD, prefix):
            return False
        self.rows |= {slot: (prompt, prefix, 0) for slot, prompt in zip(free, prompts, strict=True)}
        return True

    def grow(self) -> bool:
        slots = list(self.rows)
        lengths, _, positions = zip(*self.rows.values(), strict=True)
        return self.cache.grow(slots, lengths, positions, AHEAD)

    def end(self, slots: list[int]) -> None:
        self.cache.release(slots)
        for slot in slots:
            del self.rows[slot]

    def check(self) -> None:
        """Every page is free, or has exactly the readers that its place in the tables gives it."""
        cache, last = self.cache, self.cache.uses
        readers: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # page -> (layer, slot, column)
        for slot, (prompt, _, position) in self.rows.items():
            for layer in range(self.schedule.num_layers):
                count = int(cache._counts[layer, slot])
                stored = prompt + position  # what the layer has stored of the row, and reads at this position
                assert count == 0 if position >= last[layer] else count * PAGE_TOKENS >= stored + 1
                for column, page in enumerate(cache.table[layer, slot, :count].tolist()):
                    readers[page].append((layer, slot, column))
        free = cache._free[: cache.free].tolist()
        assert 0 not in readers and not readers.keys() & set(free)
        assert len(set(free)) == len(free) == self.pages - len(readers), "a page is lost, or free twice"
        shared = Counter[tuple[tuple[int, ...], int]]()
        for places in readers.values():
            (layer,), (column,) = {layer for layer, _, _ in places}, {column for _, _, column in places}
            slots = [slot for _, slot, _ in places]
            prefixes = {self.rows[slot][1] for slot in slots}
            if (column + 1) * PAGE_TOKENS <= max(map(len, prefixes)):  # a whole page of the prefix
                (prefix,) = prefixes
                alike = [slot for slot, row in self.rows.items() if row[1] == prefix and cache._counts[layer, slot]]
                assert sorted(slots) == sorted(alike), "one page for all rows that begin with the prefix"
                assert cache._shared[prefix].readers[layer] == len(slots)
                shared[prefix, layer] += 1
            else:
                assert len(slots) == 1, "rows write there"
        for (prefix, _), pages in shared.items():
            assert pages == len(prefix) // PAGE_TOKENS
        for slot in self.rows:
            own, tokens = cache.held_by(slot)
            assert own == sum(
                len(places) == 1 and places[0][2] * PAGE_TOKENS >= tokens
                for places in readers.values()
                if places[0][1] == slot
            )


@settings(max_examples=150, deadline=None)
@given(any_schedule(), st.integers(40, 400), st.data())
def test_pages_have_the_readers_that_are_counted(schedule: Schedule, pages: int, data: st.DataObject) -> None:
    """After any sequence of admissions, steps, ends and preemptions."""
    pool = Pool(schedule, pages)
    for _ in range(data.draw(st.integers(1, 14))):
        before = {slot: pool.cache.table[:, slot].clone() for slot in pool.rows}
        what = data.draw(st.sampled_from(["admit", "admit", "step", "end"]))
        if what == "admit":
            tokens = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
            prefix = data.draw(st.sampled_from(PREFIXES))
            missing, free = pool.cache.missing(prefix), pool.cache.free
            done = pool.admit(tokens, prefix)
            assert done or pool.cache.free == free
            written = pool.cache.take_unwritten(prefix)
            assert len(written) * (len(prefix) // PAGE_TOKENS) == (missing if done else 0)
            assert not pool.cache.take_unwritten(prefix), "they are written once"
        elif what == "step" and pool.rows:
            while pool.rows and not pool.grow():
                pool.end([max(pool.rows)])  # preempted
            pool.rows = {slot: (*row[:2], row[2] + AHEAD) for slot, row in pool.rows.items()}
            pool.end([slot for slot, row in pool.rows.items() if row[2] >= MOST_NEW])
            if pool.rows and not pool.grow():
                pool.end(list(pool.rows))
        elif what == "end" and pool.rows:
            pool.end(data.draw(st.lists(st.sampled_from(sorted(pool.rows)), unique=True, min_size=1)))
        for slot in before.keys() & pool.rows.keys():
            counts = pool.cache._counts[:, slot]
            for layer in range(schedule.num_layers):
                kept = min(int(counts[layer]), len(pool.rows[slot][1]) // PAGE_TOKENS)
                same = pool.cache.table[layer, slot, :kept] == before[slot][layer, :kept]
                assert same.all(), "pages of a prefix stay where they are while a row reads them"
        pool.check()
    pool.end(list(pool.rows))
    pool.check()
    assert pool.cache.free == pages and not pool.cache._shared and not pool.cache._shared_of


def alike(count: int, prefix: list[int], seed: int, new: int = 12) -> list[Request]:
    """Rows that begin with the prefix, greedy and sampled in turn."""
    return [
        Request(
            [*prefix, *row.prompt_ids],
            SamplingParams(max_new_tokens=new, temperature=float(place % 2), ignore_eos=True),
            row.key,
        )
        for place, row in enumerate(requests(count, seed, longest=9))
    ]


def watch(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows in flight, allocated pages) after each admission from now on."""
    seen: list[tuple[int, int]] = []
    admit = engine.admit

    def admitted(rows: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        tickets = admit(rows, prefix)
        assert engine._run is not None
        seen.append((len(engine.rows), engine._run.cache.count - engine._run.cache.free))
        return tickets

    monkeypatch.setattr(engine, "admit", admitted)
    return seen


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tickets of preempted rows, from now on."""
    preempted: list[int] = []
    take = GpuEngine.take_preempted

    def taken(engine: GpuEngine) -> list[int]:
        found = take(engine)
        preempted.extend(found)
        return found

    monkeypatch.setattr(GpuEngine, "take_preempted", taken)
    return preempted


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_hold_a_prefix_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole pages, in each layer that decode runs."""
    schedule, prefix = SCHEDULES[name].build(LAYERS), [3 + place % 80 for place in range(35)]
    rows = alike(12, prefix, seed=5)
    library, held = Decoder(tiny_model("llama")), []
    for shared in ((), prefix):
        engine = engine_of(fused("llama"), schedule, max_rows=12)
        seen = watch(engine, monkeypatch)
        got = answers(engine, rows, prefix=shared, share_prefixes=False)
        assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
        assert engine._run is not None and seen[0][0] == 12
        held.append(seen[0][1])
        assert engine.take_stats().cache_bytes == bytes_of(engine.decoder, engine._run.cache.most)
    layers = int((engine._run.cache.uses > 0).sum())
    assert held[0] - held[1] == 11 * 2 * layers, "the pages of 11 copies"


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
def test_more_rows_are_in_flight_where_they_share_pages(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is preempted: what is planned counts the prefix once."""
    schedule, prefix = SCHEDULES["1x"].build(LAYERS), [3 + place % 80 for place in range(35)]
    rows = alike(30, prefix, seed=6)
    each = max(row_pages(schedule, len(row.prompt_ids), 12 + 8, 4) for row in rows)
    alone = max(row_pages(schedule, len(row.prompt_ids) - 32, 12 + 8, 4) for row in rows)
    pages = 4 * each - 1
    preempted = preemptions(monkeypatch)
    library, most = Decoder(tiny_model("llama")), []
    for shared in ((), prefix):
        engine = engine_of(fused("llama"), schedule, pages=pages, max_rows=30)
        seen = watch(engine, monkeypatch)
        got = answers(engine, rows, scheduler, prefix=shared, share_prefixes=False)
        assert [list(tokens) for tokens in got] == oracle_answers(library, schedule, rows, STOP, got)
        most.append(max(count for count, _ in seen))
    assert most[0] == 3 and most[1] >= 1 + (pages - each) // alone > 5 and not preempted


@pytest.mark.parametrize(("name", "more"), [("1x", 8), ("3x", 8), ("prompt: first", 0)])
def test_many_prefixes_share_the_pool_with_rows_that_are_preempted(
    name: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three instructions, too few pages: rows are admitted as if none would grow, and run again from their prompt."""
    schedule = SCHEDULES[name].build(LAYERS)
    groups = [[(5 + place * (7 + 2 * group)) % 80 + 3 for place in range(17 + 8 * group)] for group in range(3)]
    rows = [row for seed, prefix in enumerate(groups) for row in alike(9, prefix, seed, new=20)]
    rows = rows[::2] + rows[1::2]
    preempted = preemptions(monkeypatch)
    monkeypatch.setattr(AdmissionEstimate, "row_pages", lambda _, prompt, new: row_pages(schedule, prompt, 6, 4))
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 1)
    largest = max(row_pages(schedule, len(row.prompt_ids), 20 + 8, 4) for row in rows)
    engine = engine_of(fused("llama"), schedule, pages=largest + more, max_rows=9)
    beginnings: set[tuple[int, ...]] = set()
    admit = engine.admit

    def admitted(wanted: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        beginnings.add(tuple(prefix))
        return admit(wanted, prefix)

    monkeypatch.setattr(engine, "admit", admitted)
    got = answers(engine, rows)
    assert preempted and beginnings == set(map(tuple, groups))
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("llama")), schedule, rows, STOP, got)
