"""Section `budget` of a job file."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.base import Section


class BudgetConfig(Section):
    """Limits of a job over all of its runs; the job stops at the first one that is reached."""

    hours: float | None = Field(None, gt=0, description="device-hours: hours of a run × GPUs, or × actors on CPUs")
    money: float | None = Field(None, gt=0, description="device-hours × price_per_hour")
    tokens: int | None = Field(None, ge=1, description="tokens generated")
