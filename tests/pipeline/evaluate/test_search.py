"""What the search returns was measured and is within the tolerance; the cheapest there is, where loss is monotone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.schedules.schedule import ScheduleSpec
from actors.engine.schedules.variants import Variant
from pipeline.evaluate.results import Score
from pipeline.evaluate.search import candidates, search


@st.composite
def lattices(draw: st.DrawFn) -> list[Variant]:
    """Up to three chains of distinct depths, mixed, cheapest first."""
    depths = draw(st.lists(st.integers(1, 40), unique=True, max_size=40))
    decays = draw(st.lists(st.sampled_from(["linear", "step", "constant"]), min_size=40, max_size=40))
    return [
        Variant(f"{depth} {decay}", "decay", ScheduleSpec(max_depth=depth, min_depth=depth, decay=decay), None)
        for depth, decay in sorted(zip(depths, decays, strict=False))
    ]


def counted(losses: dict[str, float], tried: list[str]) -> Callable[[Variant], Score]:
    def measure(variant: Variant) -> Score:
        tried.append(variant.name)
        return Score(0, 0, 0, 0, 0, losses[variant.name])

    return measure


@given(lattices(), st.data(), st.integers(1, 50))
def test_what_is_returned_is_within_the_tolerance(lattice: list[Variant], data: st.DataObject, most: int) -> None:
    """Whatever the losses are: rising, falling, noise, not a number."""
    loss = st.floats(-2, 2) | st.just(math.nan)
    losses = {one.name: data.draw(loss) for one in lattice}
    tried: list[str] = []
    result = search(lattice, counted(losses, tried), 0.5, most)
    assert [variant.name for variant, _ in result.tried] == tried
    assert len(tried) == len(set(tried)) <= most
    passed = [one for one in lattice if one.name in tried and losses[one.name] <= 0.5]
    assert result.best == (passed[0] if passed else None)
    assert "\n" not in result.summary(0.5)


@settings(deadline=None)
@given(lattices(), st.data())
def test_monotone_losses_give_the_cheapest_there_is(lattice: list[Variant], data: st.DataObject) -> None:
    losses: dict[str, float] = {}
    chains: dict[str, list[Variant]] = {}
    for one in lattice:
        chains.setdefault(one.spec.decay, []).append(one)
    for chain in chains.values():  # each on its own falls with depth; together they need not
        values = data.draw(st.lists(st.integers(-3, 9), min_size=len(chain), max_size=len(chain)))
        losses |= dict(zip((one.name for one in chain), sorted(values, reverse=True), strict=True))
    tried: list[str] = []
    result = search(lattice, counted(losses, tried), 0, most=100)
    assert result.complete
    assert result.best == next((one for one in lattice if losses[one.name] <= 0), None)
    assert len(tried) <= sum(1 + math.ceil(math.log2(len(chain) + 1)) for chain in chains.values())


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_a_chain_is_bisected(count: int) -> None:
    lattice = [Variant(f"{one}", "depth", ScheduleSpec(max_depth=one, min_depth=one), None) for one in range(count)]
    for fails in range(count + 1):
        tried: list[str] = []
        result = search(lattice, counted({f"{one}": float(one < fails) for one in range(count)}, tried), 0, 100)
        assert result.best == (lattice[fails] if fails < count else None)
        assert len(tried) <= math.ceil(math.log2(count + 1))


@given(lattices(), st.integers(1, 6))
def test_a_search_cut_short_says_so(lattice: list[Variant], most: int) -> None:
    losses = {one.name: 1.0 for one in lattice}  # none passes: every chain has to be searched to its end
    whole = search(lattice, counted(losses, []), 0, 100)
    cut = search(lattice, counted(losses, []), 0, most)
    assert whole.complete and whole.best is None
    assert cut.complete == (len(whole.tried) <= most)
    assert ("cut short" in cut.summary(0)) != cut.complete
    assert "nothing is written" in whole.summary(0)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 32), st.integers(0, 6), st.integers(2, 60), st.integers(2, 40))
def test_candidates_rise_in_cost_and_differ(layers: int, warmup: int, tokens: int, horizon: int) -> None:
    spec = ScheduleSpec(depths=(1,), warmup=min(warmup, layers), horizon=horizon, keep_order="even", prompt="first")
    decays = ("constant", "linear", "cosine")
    made = candidates(spec, layers, tokens, decays)
    schedules = [one.spec.build(layers) for one in made]
    means = [schedule.mean_depth(tokens) or 0 for schedule in schedules]
    assert means == sorted(means)
    assert len({tuple(schedule.depth(t) for t in range(100)) for schedule in schedules}) == len(made)
    assert len({one.name for one in made}) == len(made)
    assert all(min(schedule.depths) < layers for schedule in schedules)
    assert all((one.spec.keep_order, one.spec.prompt, one.spec.horizon) == ("even", "first", horizon) for one in made)
    lowest = min(spec.warmup + 1, layers)
    assert {schedule.depths[0] for schedule in schedules if len(schedule.depths) == 1} >= set(range(lowest, layers))


def test_the_candidates_of_a_model_of_12_layers() -> None:
    made = candidates(ScheduleSpec(horizon=23), 12, tokens=24)
    assert (made[0].name, made[0].spec.build(12).depths) == ("6.4x linear", (2,))
    assert (made[-1].name, made[-1].nominal) == ("1.05x linear", 1.05)
    assert sum(one.spec.decay == "constant" for one in made) == 9  # the tenth is the first of the linear ones
    assert len(made) == 34


def test_searching_nothing_and_with_no_measurement() -> None:
    result = search([], counted({}, []), 1, 3)
    assert result.best is None and "no schedule below full depth" in result.summary(1)
    with pytest.raises(ValueError, match="most = 0: allow at least one measurement"):
        search([], counted({}, []), 1, 0)
