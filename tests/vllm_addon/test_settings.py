"""The add-on's settings; no vLLM is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from actors.engine.errors import UserError
from actors.engine.schedule.file import Trained, save_spec
from actors.engine.schedule.schedule import ScheduleSpec
from actors.vllm.settings import read_settings

LAYERS = 6
STORED = ScheduleSpec(speedup=2, horizon=9, keep_order=(0, 5, 2, 3, 4, 1), prompt="first")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    built = STORED.build(LAYERS)
    trained = Trained.on(built, [built, STORED.overridden({"speedup": 3}).build(LAYERS)])
    save_spec(STORED, LAYERS, tmp_path, trained)
    return tmp_path


def test_settings_lie_on_top_of_the_checkpoints_file(model: Path) -> None:
    assert read_settings({}, str(model), LAYERS).schedule == STORED.build(LAYERS)
    assert read_settings(None, str(model), LAYERS).self_check
    faster = read_settings({"skipdecode": {"speedup": 3, "self_check": False}}, str(model), LAYERS)
    assert faster.schedule == STORED.overridden({"speedup": 3}).build(LAYERS)
    assert not faster.self_check
    assert read_settings({}, "a/name-on-the-hub", LAYERS).schedule.is_full_depth


def test_a_speed_adapter_brings_its_schedule_and_full_depth_leaves_it_out(model: Path) -> None:
    adapter = {"speed_adapter": str(model)}
    given = read_settings({"skipdecode": adapter}, "base", LAYERS)
    assert (given.speed_adapter, given.schedule) == (str(model), STORED.build(LAYERS))
    assert read_settings({"skipdecode": {**adapter, "speedup": 1}}, "base", LAYERS).speed_adapter is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sped": 2}, "skipdecode: unknown key 'sped'; did you mean speedup?"),
        ({"speedup": "2"}, "skipdecode: speedup = '2': must be a finite number"),
        ({"self_check": 1}, "skipdecode: self_check = 1 has the wrong type"),
        ({"speed_adapter": "nowhere"}, "skipdecode: speed_adapter = nowhere: not a folder with a skipdecode.json"),
        ({"keep_order": [0, 0, 1, 2, 3, 4]}, "skipdecode: keep_order[1] = 0 repeats keep_order[0]"),
        ({"speedup": 0.5}, "skipdecode: speedup = 0.5: must be at least 1"),
        ({"keep_order": "paper"}, "is not adapted to the schedule (it was trained with another keep_order or warmup)"),
        ([2], "skipdecode: must be an object of settings, not [2]"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(model: Path, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        read_settings({"skipdecode": settings}, str(model), LAYERS)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_training_skips_only_where_that_is_said(tmp_path: Path) -> None:
    settings = {"speedup": 2, "horizon": 9}
    with pytest.raises(UserError, match=r"skipdecode\.json records no training"):
        read_settings({"skipdecode": settings}, str(tmp_path), LAYERS)
    schedule = read_settings({"skipdecode": {**settings, "unadapted": True}}, str(tmp_path), LAYERS).schedule
    assert schedule == ScheduleSpec(speedup=2, horizon=9).build(LAYERS)
