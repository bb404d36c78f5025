"""The GPU's engine on a GPU that is not there: devices, waits, captures and compiled kernels; values are others' tests.

In a process of its own: Triton either interprets kernels, as the other tests have it do, or compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")


def run(*chosen: str) -> None:
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(here / "fake_gpu_checks.py"),
        *chosen,
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_engine_on_a_fake_gpu() -> None:
    run("-k", "not benchmark")


@pytest.mark.slow
def test_the_benchmark_on_a_fake_gpu() -> None:
    run("-k", "benchmark")
