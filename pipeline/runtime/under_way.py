"""Whether the job is under way in this process, or still being planned: a Ray may be up in both."""

from __future__ import annotations

import sys

_planning = False


def plan(being_planned: bool) -> None:
    """A job begins to be planned, or has been."""
    global _planning
    _planning = being_planned


def is_under_way() -> bool:
    """Whether its driver, this process or another one, has planned it, and so has reached the stores that it names."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized()) and not _planning
