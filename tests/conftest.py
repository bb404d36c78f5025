from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and two busy ones get in each other's way


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For xdist: all that starts a Ray is one group, else a file is one. Two Rays that start at once on two cores
    outlast the 30 s that Ray gives itself."""
    for item in items:
        rays = "own_ray" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ray")
        item.add_marker(pytest.mark.xdist_group("ray" if rays else item.path.name))
