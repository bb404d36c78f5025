"""Which speeds a request may ask for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors.engine.errors import UserError
from actors.generator import Generator


def test_speeds_that_the_checkpoint_was_not_trained_for_are_refused(chat_checkpoint: Path, tmp_path: Path) -> None:
    trained = Generator(str(chat_checkpoint), dtype="float32")
    assert trained.schedule_at(1).is_full_depth and trained.schedule_at(2) is trained.schedule
    assert trained.schedule_at(3).depths[0] < trained.schedule.depths[0]
    with pytest.raises(UserError, match="speedup"):
        trained.schedule_at(0.5)
    plain = tmp_path / "plain"
    shutil.copytree(chat_checkpoint, plain)
    (plain / "skipdecode.json").unlink()
    untrained = Generator(str(plain), dtype="float32")
    assert untrained.schedule_at(1) is untrained.schedule
    with pytest.raises(UserError, match="speed = 2: the model is not adapted"):
        untrained.schedule_at(2)
