from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch imports Triton: without a GPU kernels are interpreted

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits does not spin
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as the command line sets them: Ray on the loopback
os.environ.setdefault("RAY_AUTH_MODE", "token")

import pytest
import torch
from hypothesis import HealthCheck, settings
from tiny_checkpoint import tiny_checkpoint

torch.set_num_threads(1)  # tensors are tiny
checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("suite", deadline=None, suppress_health_check=checks)  # a slow machine fails no test
settings.load_profile("suite")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokenizer and schedule; no test changes it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay: collections that scan them take a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """A job in this process leaves torch with a thread for each core."""
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file of tests has imported stays too; each training collects several times, over all of it."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test that starts Ray. `make test` runs these in one process and all others in another: two Ray
    clusters that start at the same time on two cores exceed Ray's own limit of 30 s."""
    if "own_ray" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ray)
