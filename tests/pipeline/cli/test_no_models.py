"""A driver reads a checkpoint without torch, and to the same effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_adapter import random_adapter

from actors.engine.schedules.schedule import ScheduleSpec
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.prepare.tokenizer import known_tokenizer

DRIVER = """
import json, sys
from pipeline.cli.no_models import without_models
from pipeline.config.job import ModelConfig, StorageConfig
model = ModelConfig.model_validate_json(sys.argv[1])
without_models(model)
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.prepare.tokenizer import known_tokenizer
found = resolve_checkpoint(model, StorageConfig(), None)
known = known_tokenizer(found).class_name, found.checkpoint.context_length, found.checkpoint.has_pages, found.identity()
before = "torch" in sys.modules
import torch
without_models(model)
print(json.dumps([before, torch.ones(2).sum().item(), *known]))
"""


@pytest.mark.parametrize("adapted", [False, True])
def test_a_checkpoint_and_its_tokenizer_are_the_same(checkpoint: Path, tmp_path: Path, adapted: bool) -> None:
    adapter = random_adapter(checkpoint, tmp_path / "adapter", ScheduleSpec(speedup=2, horizon=4)) if adapted else None
    model = ModelConfig(path=str(checkpoint), speed_adapter=None if adapter is None else str(adapter))
    given = model.model_dump_json()
    done = subprocess.run([sys.executable, "-c", DRIVER, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = resolve_checkpoint(model, StorageConfig(), None)
    looked_at = found.checkpoint
    known = known_tokenizer(found).class_name, looked_at.context_length, looked_at.has_pages, found.identity()
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps([adapted, 2.0, *known]))
