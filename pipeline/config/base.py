"""What every section of every file is: a pydantic model that takes nothing it does not know."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from actors.engine.errors import UserError
from pipeline.messages import without_secrets


class Section(BaseModel):
    """A part of a file: unknown keys are refused, and so are values of another type (a whole number is a float)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _fits_into_64_bits(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{name} must be below 2^63")
        return values


SECRET = "secret"  # the type of a problem whose value is not to be shown


def _holds_secret() -> PydanticCustomError:
    return PydanticCustomError(
        SECRET, "holds a user or password, which would be written down; give them by the environment"
    )


def _place(value: str) -> str:
    if without_secrets(value) != value:
        raise _holds_secret()
    if "\0" in value:
        raise UserError("holds a null character")
    return value


Place = Annotated[str, AfterValidator(_place)]  # a path or URL; it is written to the output, so it holds no secret


def _endpoint(value: str) -> str:
    if "@" in value:  # whatever stands before it
        raise _holds_secret()
    return value


Endpoint = Annotated[Place, AfterValidator(_endpoint)]  # a server's URL
