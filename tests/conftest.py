from __future__ import annotations

import gc
import os
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia")):
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # set before torch imports Triton; without a GPU kernels are interpreted

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tensors are tiny: a second thread only spins
settings.register_profile("suite", deadline=None)  # a slow machine fails no test
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay: collections that scan them take a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test that starts Ray. `make test` runs these in one process and all others in another: two Ray
    clusters that start at the same time on two cores exceed Ray's own limit of 30 s."""
    if "own_ray" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ray)
