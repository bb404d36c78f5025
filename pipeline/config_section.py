"""What every section of every file is: a pydantic model that takes nothing it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a file: unknown keys are refused, and so are values of another type (a whole number is a float)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
