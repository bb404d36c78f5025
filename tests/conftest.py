from __future__ import annotations

import os
from pathlib import Path

if not any(Path(one).exists() for one in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia")):
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before torch imports Triton: its kernels are tried without a GPU too

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and two busy ones get in each other's way


def pytest_itemcollected(item: pytest.Item) -> None:
    """All that starts a Ray is marked: `make test` runs it in one process and the rest in another. Two Rays that
    start at once on two cores outlast the 30 s that Ray gives itself."""
    if "own_ray" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ray)
