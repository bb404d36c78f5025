"""The CPU's bfloat16 products, and the layers made of them, on a processor without AVX512-BF16: see avx512_bf16.h."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actors.engine.cpu import library

HERE = Path(__file__).parent
NATIVE = library.multiplies(torch.bfloat16, torch.device("cpu"))
FLAGS = library._processor().split()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NATIVE, reason="the processor has the instructions: test_cpu_layers.py tests them"),
    pytest.mark.skipif(not {"avx512f", "avx512bw", "avx512vl"} <= set(FLAGS), reason="emulated by AVX-512"),
    pytest.mark.skipif(library.library() is None, reason="no C++ compiler"),
]


def test_products_and_native_layers(tmp_path: Path) -> None:
    """In a process of its own, for the kernels are loaded once."""
    environment = {
        **os.environ,
        "CXX": f"{os.environ.get('CXX') or 'g++'} -include {HERE / 'avx512_bf16.h'}",
        "SKIPDECODE_CACHE": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_cpu_layers.py")]
    chosen = "one_call or one_behind or prefix_computed or packed_product or attention_of_prompts or behind_a_prefix"
    done = subprocess.run([*command, "-k", chosen, "-rs"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-1000:]
