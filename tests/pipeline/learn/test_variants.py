"""Comparisons spend exactly the layers of the paper's schedule; each is a schedule, and is what its name says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from pipeline.learn.variants import comparisons, speeds


def comparison_schedules(spec: ScheduleSpec, layers: int, *given: Any, **named: Any) -> dict[str, Schedule]:
    return {one.name: one.spec.build(layers) for one in comparisons(spec, layers, *given, **named)}


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(4, 48), st.floats(1, 6), st.integers(2, 100), st.integers(2, 80), st.integers(2, 9))
def test_all_comparisons_have_one_mean_depth(
    data: st.DataObject, layers: int, speedup: float, tokens: int, horizon: int, steps: int
) -> None:
    """Not nearly but exactly, whatever the checkpoint's own schedule; the law is Schedule's own check."""
    warmup = data.draw(st.integers(0, layers))
    own = {"decay": "cosine", "keep_order": "even", "prompt": "first", "depths": (layers,)}
    spec = ScheduleSpec(horizon=horizon, warmup=warmup, steps=steps, **data.draw(st.sampled_from([{}, own])))
    learned = (*range(warmup), *data.draw(st.permutations(range(warmup, layers))))
    made = comparison_schedules(spec, layers, speedup, tokens, learned)
    assert len(made) == 10
    first, *others = made.values()
    paper = ScheduleSpec(speedup=speedup, horizon=horizon, warmup=warmup).build(layers)
    assert first == paper
    steps_run = tokens - 1
    for schedule in others:
        assert schedule.layer_steps(steps_run) == paper.layer_steps(steps_run)
        assert schedule.depth(10**6) >= min(warmup + 1, layers)
    constant = made[f"{speedup:g}x constant"].depths
    assert constant[0] - constant[-1] <= 1
    assert {name for name, one in made.items() if one.prompt == "first"} == {f"{speedup:g}x prompt first"}


@settings(deadline=None, max_examples=40)
@given(st.integers(4, 48), st.sampled_from([1, 1.5, 2, 3, 4, 5]), st.integers(2, 80))
def test_a_decay_keeps_its_shape(layers: int, speedup: float, horizon: int) -> None:
    """Where no end of the range is in the way, each is its own curve moved by the same amount, rounded."""
    made = comparison_schedules(ScheduleSpec(horizon=horizon), layers, speedup, horizon + 1)
    high, low = made[f"{speedup:g}x paper"].depths[0], made[f"{speedup:g}x paper"].depths[-1]
    for name, decay, power in (("cosine", "cosine", 2.0), ("power 0.5", "power", 0.5), ("power 2", "power", 2.0)):
        got = made[f"{speedup:g}x {name}"]
        if got.depths[0] < layers and got.depths[-1] > 2:
            plain = ScheduleSpec(max_depth=high, min_depth=low, horizon=horizon, decay=decay, power=power).build(layers)
            moved = [got.depth(t) - plain.depth(t) for t in range(horizon)]
            assert max(moved) - min(moved) <= 2  # moved by a whole layer, halves round to the even side of both


def test_the_comparisons_of_a_model_of_24_layers() -> None:
    spec = ScheduleSpec(speedup=5, horizon=9, keep_order="even")
    made = comparisons(spec, 24, 3, tokens=10, learned=(0, *range(23, 0, -1)))
    assert [(one.name, one.group) for one in made] == [
        ("3x paper", "keep order"),
        ("3x even order", "keep order"),
        ("3x learned order", "keep order"),
        ("3x early exit", "keep order"),
        ("3x cosine", "decay"),
        ("3x power 0.5", "decay"),
        ("3x power 2", "decay"),
        ("3x step", "decay"),
        ("3x constant", "depth"),
        ("3x prompt first", "prompt"),
    ]
    depths = {one.name.removeprefix("3x "): one.spec.build(24).depths for one in made}
    assert depths["paper"] == depths["early exit"] == depths["prompt first"] == (11, 10, 10, 9, 8, 7, 6, 6, 5)
    assert depths["cosine"] == (11, 11, 10, 9, 8, 7, 6, 5)
    assert depths["power 0.5"] == (12, 10, 9, 8, 7, 7, 7, 6)
    assert depths["power 2"] == (10, 10, 10, 9, 9, 8, 7, 5, 4)
    assert depths["step"] == (12, 12, 10, 9, 7, 7, 5)
    assert depths["constant"] == (8,)
    assert made[3].spec.build(24).layers(8) == (0, 1, 2, 3, 4)
    assert all(one.nominal == 3 and one.spec.horizon == 9 for one in made)


def test_speeds_keep_what_the_checkpoint_says() -> None:
    spec = ScheduleSpec(depths=(9, 8), horizon=7, decay="step", keep_order="even", prompt="first")
    one, two = speeds(spec, [1, 2.5])
    assert (one.name, one.group, one.nominal) == ("1x", "speed", 1)
    assert two.name == "2.5x" and two.spec == ScheduleSpec(
        speedup=2.5, horizon=7, decay="step", keep_order="even", prompt="first"
    )
    assert one.spec.build(12).depths == (12,)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon is not set"):
        comparisons(ScheduleSpec(), 24, 3, tokens=20)
    with pytest.raises(ValueError, match="keep_order has 2 entries for 24 layers"):
        comparisons(ScheduleSpec(horizon=9), 24, 3, tokens=20, learned=(0, 1))
    with pytest.raises(ValueError, match="steps = 1: must be at least 2"):
        comparisons(ScheduleSpec(horizon=9, steps=1), 24, 3, tokens=20)


def test_a_constant_depth_between_two_integers_is_two_stairs() -> None:
    made = comparison_schedules(ScheduleSpec(horizon=9), 24, 3, tokens=7)  # the first six of nine positions: 55 layers
    assert made["3x constant"].depths == (10, 9)
