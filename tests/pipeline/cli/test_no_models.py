"""A driver reads a checkpoint without torch, and to the same effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.prepare.tokenizer import known_tokenizer

DRIVER = """
import json, sys
from pipeline.cli.no_models import without_models
without_models()
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import ModelConfig, StorageConfig
from pipeline.prepare.tokenizer import known_tokenizer
found = resolve_checkpoint(ModelConfig(path=sys.argv[1]), StorageConfig(), None)
known = known_tokenizer(found).class_name, found.checkpoint.context_length, found.checkpoint.has_pages, found.identity()
before = "torch" in sys.modules
import torch
without_models()
print(json.dumps([before, torch.ones(2).sum().item(), *known]))
"""


def test_a_checkpoint_and_its_tokenizer_are_the_same(checkpoint: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = resolve_checkpoint(ModelConfig(path=str(checkpoint)), StorageConfig(), None)
    looked_at = found.checkpoint
    known = known_tokenizer(found).class_name, looked_at.context_length, looked_at.has_pages, found.identity()
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps([False, 2.0, *known]))
