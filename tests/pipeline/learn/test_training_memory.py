"""Memory of a training: kept between steps, and without the checkpoint's file."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint

from actors.engine.model.loading import load_model
from pipeline.config.tune import AdapterConfig
from pipeline.learn.tune.adapters import add_adapters, round_frozen

SCRIPT = """
import resource
import torch
from pipeline.learn.tune.train import kept_heap

PAGES = 6 * 8 * 2**20 // 4096

def faults_of_a_step():
    'Page faults while memory is taken as by a step, all of it freed at the end.'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(2 * 2**20) for _ in range(6)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del pieces
    return faults

with kept_heap():
    faults_of_a_step()
    assert faults_of_a_step() < PAGES / 4
assert faults_of_a_step() > PAGES / 2
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_the_next_step_finds_the_memory_of_the_last_one() -> None:
    """In a process of its own: what other tests have left in the heap would count."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_weight_of_an_adapters_base_stays_in_the_checkpoints_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "base")
    model = load_model(checkpoint, torch.float32, None, "sdpa")
    before = model.get_input_embeddings().weight.detach().clone()

    def is_mapped() -> bool:
        return str(checkpoint / "model.safetensors") in Path("/proc/self/maps").read_text()

    assert is_mapped()
    add_adapters(model, AdapterConfig(rank=2))
    round_frozen(model)
    assert not is_mapped()
    assert torch.equal(model.get_input_embeddings().weight, before)
