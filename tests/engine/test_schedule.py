"""The law of the schedule as a property, what is published as examples, and every refusal with its position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.schedule.file import SCHEDULE_FILE, Trained, load_spec, load_trained, read_spec, save_spec
from actors.engine.schedule.schedule import (
    DECAYS,
    KEEP_ORDERS,
    Schedule,
    ScheduleSpec,
    depths_for_speedup,
    early_exit_order,
    even_order,
    paper_order,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every schedule that can be asked for: all curves, orders and prompt policies, from depths or a speed-up."""
    layers = draw(st.integers(1, 40))
    warmup = draw(st.integers(1, layers))
    shape: dict[str, Any] = {
        "warmup": warmup,
        "prompt": draw(st.sampled_from(["full", "first"])),
        "horizon": draw(st.integers(2, 50)),
        "power": draw(st.floats(0.1, 8)),
        "steps": draw(st.integers(2, 9)),
        "keep_order": draw(
            st.sampled_from([*KEEP_ORDERS])
            | st.permutations(range(warmup, layers)).map(lambda rest: (*range(warmup), *rest))
        ),
    }
    kind = draw(st.sampled_from(["speedup", "range", "list", "full"]))
    if kind == "speedup":
        shape |= {"speedup": draw(st.floats(1, 8)), "decay": draw(st.sampled_from(DECAYS))}
    elif kind == "range":
        low, high = sorted((draw(st.integers(warmup, layers)), draw(st.integers(warmup, layers))))
        decay = draw(st.sampled_from(DECAYS[:4])) if low < high else "constant"
        shape |= {"min_depth": low, "max_depth": high, "decay": decay}
    elif kind == "list":
        depths = sorted(draw(st.lists(st.integers(warmup, layers), min_size=1, max_size=60)), reverse=True)
        shape |= {"depths": tuple(depths)}
    return ScheduleSpec(**shape).build(layers)


@given(schedules(), st.integers(1, 120))
def test_the_law(schedule: Schedule, max_new_tokens: int) -> None:
    """Whenever a layer runs for a token, it has run for every earlier token of the row: no hole in its cache."""
    steps = max_new_tokens - 1
    ran = [set(schedule.layers(t)) for t in range(steps)]
    for t, layers in enumerate(ran):
        assert schedule.warmup <= len(layers) == schedule.depth(t) <= schedule.num_layers
        assert layers <= set(schedule.prompt_layers)
        assert all(layers <= earlier for earlier in ran[:t])
        assert set(range(schedule.warmup)) <= layers
    for layer in range(schedule.num_layers):
        positions = [t for t in range(steps) if layer in ran[t]]
        assert positions == list(range(schedule.uses(layer, max_new_tokens)))
    assert schedule.layer_steps(steps) == sum(map(len, ran))
    mean = schedule.mean_depth(max_new_tokens)
    assert mean == (sum(map(len, ran)) / steps if steps else None)


@given(schedules())
def test_a_spec_survives_its_file(schedule: Schedule) -> None:
    spec = ScheduleSpec(
        depths=schedule.depths, keep_order=schedule.keep_order, warmup=schedule.warmup, prompt=schedule.prompt
    )
    values = json.loads(json.dumps({"num_layers": schedule.num_layers, **spec.to_dict()}))
    read = read_spec(values, schedule.num_layers, "x").build(schedule.num_layers)
    assert read.to_dict() == schedule.to_dict()


@pytest.mark.parametrize(
    ("layers", "speedup", "published"),
    [
        (32, 2, (22, 11)),
        (32, 3, (14, 8)),
        (32, 4, (10, 6)),
        (32, 5, (8, 5)),
        (24, 2, (16, 8)),
        (24, 5, (6, 4)),
        (24, 1, (24, 24)),
    ],
)
def test_depths_are_within_one_layer_of_the_published(layers: int, speedup: float, published: tuple[int, int]) -> None:
    got = depths_for_speedup(layers, speedup)
    assert all(abs(mine - theirs) <= 1 for mine, theirs in zip(got, published, strict=True))


@pytest.mark.parametrize("decay", [decay for decay in DECAYS if decay != "power"])  # that is meant to lie above
def test_layer_ratio_over_the_horizon_is_near_nominal(decay: str) -> None:
    for speedup in (1, 2, 3, 4, 5):
        schedule = ScheduleSpec(speedup=speedup, horizon=30, decay=decay).build(24)
        mean = schedule.mean_depth(31)
        assert mean is not None and 24 / mean == pytest.approx(speedup, rel=0.08)


def test_curves() -> None:
    spec = ScheduleSpec(max_depth=9, min_depth=5, horizon=5)
    assert spec.build(12).depths == (9, 8, 7, 6, 5)
    assert spec.overridden({"decay": "step", "steps": 2}).build(12).depths == (9, 9, 5, 5, 5)
    assert spec.overridden({"decay": "power", "power": 2.0}).build(12).depths == (9, 9, 8, 7, 5)
    assert spec.overridden({"decay": "cosine"}).build(12).depths == (9, 8, 7, 6, 5)
    assert spec.build(12).depth(10**9) == 5


def test_orders() -> None:
    assert paper_order(6, 1) == (0, 5, 4, 3, 2, 1)
    assert paper_order(6, 2) == (0, 1, 5, 4, 3, 2)
    assert early_exit_order(4) == ScheduleSpec(keep_order="early_exit", warmup=2).build(4).keep_order == (0, 1, 2, 3)
    assert even_order(9, 1) == (0, 8, 4, 6, 2, 7, 5, 3, 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ScheduleSpec(depths=(6, 4, 5)), r"depths\[2\] = 5 rises above depths\[1\] = 4"),
        (ScheduleSpec(depths=(9, 4)), r"depths\[0\] = 9: must lie in \[1, 6\]"),
        (ScheduleSpec(depths=(6, 1), warmup=2), r"depths\[1\] = 1: must lie in \[2, 6\]"),
        (ScheduleSpec(depths=()), "depths is empty"),
        (ScheduleSpec(keep_order=(0, 1, 2, 3, 4, 4)), r"keep_order\[5\] = 4 repeats keep_order\[4\]"),
        (ScheduleSpec(keep_order=(0, 1, 2, 3, 4, 6)), r"keep_order\[5\] = 6: no such layer"),
        (ScheduleSpec(keep_order=(0, 1)), "keep_order has 2 entries for 6 layers"),
        (ScheduleSpec(keep_order=(5, 0, 1, 2, 3, 4)), "must begin with the 1 warm-up layers"),
        (ScheduleSpec(keep_order="odd"), "keep_order = 'odd'"),
        (ScheduleSpec(warmup=7), "warmup = 7"),
        (ScheduleSpec(prompt="half"), "prompt = 'half'"),
        (ScheduleSpec(decay="slow", speedup=2), "decay = 'slow'"),
        (ScheduleSpec(speedup=0.5), "speedup = 0.5"),
        (ScheduleSpec(speedup=0, decay="constant"), "speedup = 0: must be at least 1"),
        (ScheduleSpec(speedup=-1, decay="constant"), "speedup = -1: must be at least 1"),
        (ScheduleSpec(speedup=float("nan"), decay="constant"), "speedup = nan: must be a finite number"),
        (ScheduleSpec(speedup=2), "horizon is not set"),
        (ScheduleSpec(speedup=2, horizon=1), "horizon = 1"),
        (ScheduleSpec(speedup=2, horizon=10_000_000), r"horizon = 10000000: must lie in \[2, 131072\]"),
        (ScheduleSpec(speedup=2, depths=(3,)), "depths and speedup both set the depth"),
        (ScheduleSpec(max_depth=3, min_depth=4), "min_depth = 4 lies above max_depth = 3"),
        (ScheduleSpec(max_depth=4, min_depth=3, decay="constant"), "decay = constant needs"),
        (ScheduleSpec(speedup=2, horizon=4, decay="power", power=0.0), "power = 0.0"),
        (ScheduleSpec(speedup=2, horizon=4, decay="step", steps=1), "steps = 1"),
    ],
)
def test_refusals_name_the_position(spec: ScheduleSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleSpec().overridden(spec.to_dict()).build(6)


def test_a_schedule_of_a_program_is_checked() -> None:
    with pytest.raises(ValueError, match="prompt = 'half'"):
        Schedule(2, (2,), (0, 1), prompt="half")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "holds no JSON object, but list"),
        ('{"num_layers": 8}', "made for num_layers = 8, but the model has 6 layers"),
        ("{}", "made for num_layers = None"),
        ('{"num_layers": 6, "speed": 2}', "unknown key 'speed'; did you mean speedup"),
        ('{"num_layers": 6, "speedup": "2"}', "speedup = '2': must be a finite number"),
        ('{"num_layers": 6, "depths": [6, true]}', "depths = .*: must be a list of whole numbers"),
        ('{"num_layers": 6, "depths": [3, 4]}', r"depths\[1\] = 4 rises"),
    ],
)
def test_a_stored_schedule_is_checked(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / SCHEDULE_FILE).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_spec(tmp_path, 6)
    assert str(caught.value).startswith(str(tmp_path / SCHEDULE_FILE))


def test_a_job_overrides_what_the_checkpoint_stores(tmp_path: Path) -> None:
    assert load_spec(tmp_path, 24) is None
    save_spec(ScheduleSpec(speedup=3, horizon=20, keep_order="even"), 24, tmp_path)
    stored = load_spec(tmp_path, 24)
    assert stored is not None and stored.build(24).depths[0] == 11
    faster = stored.overridden({"speedup": 5.0}).build(24)
    assert faster.depths[0] == 6 and len(faster.depths) == 20 and faster.keep_order == even_order(24, 1)
    assert stored.overridden({"depths": (4,)}).build(24).depths == (4,)


RECORD = '{"num_layers": 6, "trained": %s}'


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("2", "trained must hold depths and prompt, and no other key"),
        ('{"min_depth": 2}', "trained must hold depths and prompt, and no other key"),
        ('{"depths": [5, 2], "min_depth": 2, "prompt": ["full"]}', "trained must hold depths and prompt, and no other"),
        ('{"depths": [true], "prompt": ["full"]}', "trained.depths = True"),
        ('{"depths": [5, 6], "prompt": ["full"]}', r"trained.depths = 6: must be a whole number in \[1, 5\]"),
        ('{"depths": [7], "prompt": ["full"]}', r"trained.depths = 7: must be a whole number in \[1, 6\]"),
        ('{"depths": [2.5], "prompt": ["full"]}', r"trained.depths = 2.5: must be a whole number"),
        ('{"depths": [], "prompt": ["full"]}', r"trained.depths must list 1 to 131072 numbers"),
        ('{"depths": 3, "prompt": ["full"]}', r"trained.depths must list 1 to 131072 numbers"),
        ('{"depths": [2], "prompt": []}', r"trained.prompt = \[\]: must list some of full, first"),
        ('{"depths": [2], "prompt": ["half"]}', r"trained.prompt = \['half'\]"),
    ],
)
def test_the_record_of_a_training_is_checked(tmp_path: Path, record: str, message: str) -> None:
    (tmp_path / SCHEDULE_FILE).write_text(RECORD % record)
    spec = load_spec(tmp_path, 6)
    assert spec == ScheduleSpec()
    with pytest.raises(ValueError, match=message) as caught:
        load_trained(tmp_path, 6, spec)
    assert str(caught.value).startswith(str(tmp_path / SCHEDULE_FILE))


@given(schedules(), st.data())
def test_a_record_covers_what_was_drawn_and_the_layers_that_ran(stored: Schedule, data: st.DataObject) -> None:
    """Slow definition: every position's layers are those of a depth that training reached there, or of a deeper one,
    and the prompt's are those of a policy that it ran."""
    layers = stored.num_layers
    of_order = {"num_layers": layers, "keep_order": stored.keep_order, "warmup": stored.warmup}
    depths = st.lists(st.integers(max(stored.warmup, 1), layers), min_size=1, max_size=6)
    made = st.builds(
        lambda falling, prompt: Schedule(depths=tuple(sorted(falling, reverse=True)), prompt=prompt, **of_order),
        depths,
        st.sampled_from(("full", "first")),
    )
    drawn = data.draw(st.lists(made, min_size=1, max_size=4))
    trained = Trained.on(stored, drawn)
    assert all(trained.covers(one) for one in drawn)
    asked = data.draw(made)
    ran = all(
        set(asked.layers(position)) >= set.intersection(*(set(one.layers(position)) for one in drawn))
        for position in range(9)
    )
    policies = {one.prompt for one in drawn}
    whole_prompt = set(asked.prompt_layers) == set(range(layers))
    assert trained.covers(asked) == (ran and (asked.prompt in policies or (whole_prompt and "full" in policies)))


def test_a_curve_that_was_not_trained_is_not_covered(tmp_path: Path) -> None:
    """Trained at 1.5, 2 and 3 over 33 tokens: speeds between them, longer horizons and deeper lists are covered."""
    spec = ScheduleSpec(speedup=3, horizon=33)
    drawn = [spec.overridden({"speedup": speed}).build(30) for speed in (1.0, 1.5, 2.0, 3.0)]
    save_spec(spec, 30, tmp_path, Trained.on(spec.build(30), drawn))
    trained = load_trained(tmp_path, 30, spec)
    assert trained is not None and trained.depths == drawn[-1].depths
    covered: list[dict[str, Any]] = [{}, {"speedup": 1.25}, {"speedup": 2.5}, {"horizon": 34}, {"depths": (13, 13, 13)}]
    covered += [{"decay": "constant", "speedup": 2.0}, {"max_depth": 20, "min_depth": 7}]
    for changes in covered:
        assert trained.difference(spec.overridden(changes).build(30)) is None, changes
    shapes: dict[str, dict[str, Any]] = {
        "at token 1 it was trained down to 13 layers, not to 7: a shorter horizon or another decay": {"horizon": 2},
        "at token 0 it was trained down to 13 layers, not to 10": {"decay": "constant"},
        "at token 1 it was trained down to 13 layers, not to 7": {"depths": (24, 7)},
        "at token 0 it was trained down to 13 layers, not to 12": {"depths": (12,)},
        "it was trained down to 7 layers, not to 4": {"depths": (24, 4)},
        "it was trained down to 7 layers, not to 5": {"speedup": 4.0},
    }
    for reason, changes in shapes.items():
        assert str(trained.difference(spec.overridden(changes).build(30))).startswith(reason)


def test_the_committed_records_cover_what_their_jobs_run() -> None:
    root = Path(__file__).parents[2] / "configs"
    adapters = [path.parent for path in root.glob("*/*/" + SCHEDULE_FILE)]
    assert len(adapters) >= 5
    for folder in adapters:
        layers = json.loads((folder / SCHEDULE_FILE).read_text())["num_layers"]
        spec = load_spec(folder, layers)
        assert spec is not None
        trained = load_trained(folder, layers, spec)
        for speed in (1.25, 1.5, 2.0, 3.0, *((4.0, 5.0) if layers == 24 else ())):
            covered = trained is not None and trained.covers(spec.overridden({"speedup": speed}).build(layers))
            assert covered == (speed <= 2 or folder.name != "summaries-adapter"), folder  # its job goes to 2x


def test_a_record_holds_for_its_keep_order_and_warmup_alone(tmp_path: Path) -> None:
    spec = ScheduleSpec(speedup=2, horizon=8)
    stored = spec.build(12)
    others = [spec.overridden({"keep_order": "even"}).build(12), spec.overridden({"warmup": 2}).build(12)]
    save_spec(spec, 12, tmp_path, Trained.on(stored, [stored, *others]))
    trained = load_trained(tmp_path, 12, load_spec(tmp_path, 12))
    assert trained is not None and trained.covers(stored) and not any(trained.covers(other) for other in others)
    assert (trained.depths, trained.prompt) == (stored.depths, ("full",))
    at_full_depth = Trained.on(stored, [ScheduleSpec().build(12)])
    assert at_full_depth.depths == (12,) and not at_full_depth.covers(stored)
    assert Trained.on(stored, others).depths == (12,)  # nothing of this order was trained
    save_spec(spec, 12, tmp_path)
    assert load_trained(tmp_path, 12, load_spec(tmp_path, 12)) is None
