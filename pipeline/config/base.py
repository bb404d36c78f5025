"""Defines the base class of all sections of configuration files: a pydantic model that refuses unknown keys."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from actors.engine.errors import UserError
from pipeline.messages import where_sought, without_secrets


class Section(BaseModel):
    """A section of a configuration file. Unknown keys and wrong types are errors. A float key accepts whole numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{name} must be below 2^63")
        return {name: {} if value is None and cls._is_section(name) else value for name, value in values.items()}

    @classmethod
    def _is_section(cls, name: str) -> bool:
        """Return whether the key holds a section. YAML reads a section whose keys are all comments as null."""
        kind = getattr(cls.model_fields.get(name), "annotation", None)
        return isinstance(kind, type) and issubclass(kind, Section)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class in a field's type, such as a section or a list of sections; None without a section."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


SECRET = "secret"  # type of a pydantic error whose message must not show the value


def holds_secret() -> PydanticCustomError:
    """Return the error for a value that holds a secret."""
    return PydanticCustomError(
        SECRET, "holds a user or password, which would be saved in the output; set them in the environment"
    )


def place(value: str) -> str:
    """Replace `~` and `$NAME` in a path or URL. Raises UserError if the value is empty, invalid or holds a secret."""
    value = os.path.expandvars(os.path.expanduser(value))
    if without_secrets(value) != value:
        raise holds_secret()
    if "\0" in value:
        raise UserError("holds a null character")
    if not value.strip():
        raise UserError("is empty")
    if unset := re.search(r"\$\{\w+\}", value):
        raise UserError(f"the environment variable {unset[0]} is not set; set it")
    return value


def text_of(file: str | Path) -> str:
    """Return the text of a file in UTF-8. Raises UserError if it cannot be read."""
    try:
        return Path(file).read_text("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file{where_sought(file)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not text in UTF-8; save it in this encoding") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None


# a path or URL, in which ~ and $NAME are replaced; without secrets, because it is saved in the output
Place = Annotated[str, AfterValidator(place)]


_NAMES = re.compile(r"(password|passwd|pwd|secret|token|credential|api_?key)[^=&;]*=", re.I)  # secrets in URLs


def _endpoint(value: str) -> str:
    if "@" in value or _NAMES.search(value):
        raise holds_secret()
    return value


Endpoint = Annotated[Place, AfterValidator(_endpoint)]  # a server's URL
