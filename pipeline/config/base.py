"""Defines the base class of all sections of configuration files: a pydantic model that refuses unknown keys."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from actors.engine.errors import UserError
from pipeline.messages import without_secrets

log = logging.getLogger(__name__)


class Section(BaseModel):
    """A section of a configuration file. Unknown keys and wrong types are errors. A float key accepts whole numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    renamed: ClassVar[dict[str, str]] = {}  # old key -> the new key, perhaps with advice
    removed: ClassVar[dict[str, tuple[Any, str]]] = {}  # old key -> its default, and the advice for users who set it

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if name in cls.renamed:
                raise UserError(f"{name} is now {cls.renamed[name]}")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{name} must be below 2^63")
            if name in cls.removed and value != cls.removed[name][0]:
                raise UserError(f"{name} was removed: {cls.removed[name][1]}")
            if name in cls.removed:
                log.warning("the key %s was removed and is ignored; leave it out", name)
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if name not in cls.removed}
            values = {name: {} if value is None and cls._is_section(name) else value for name, value in values.items()}
        return values

    @classmethod
    def _is_section(cls, name: str) -> bool:
        """Return whether the key must hold a section, so that null (as all its keys are comments) is an empty one."""
        kind = getattr(cls.model_fields.get(name), "annotation", None)
        return isinstance(kind, type) and issubclass(kind, Section)


def without_removed(stored: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Return recorded values without those keys that have been removed since and have their old default value.

    A job can then be resumed although an earlier version recorded these keys.
    """
    kept: dict[str, Any] = {}
    for key, value in stored.items():
        if key in section.removed and value == section.removed[key][0]:
            continue
        nested = section_of(section.model_fields[key].annotation) if key in section.model_fields else None
        kept[key] = without_removed(value, nested) if nested is not None and isinstance(value, Mapping) else value
    return kept


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class in a field's type, which may be a list of sections; None if the type has no section."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


SECRET = "secret"  # type of a pydantic error whose message must not show the value


def holds_secret() -> PydanticCustomError:
    """Return the error for a value that holds a secret. The message does not show the value."""
    return PydanticCustomError(
        SECRET, "holds a user or password, which would be saved in the output; set them in the environment"
    )


def place(value: str) -> str:
    """Return a path or URL with `~` and `$NAME` replaced. Raises UserError if it cannot be one, or holds a secret."""
    value = os.path.expandvars(os.path.expanduser(value))
    if without_secrets(value) != value:
        raise holds_secret()
    if "\0" in value:
        raise UserError("holds a null character")
    if not value.strip():
        raise UserError("is empty")
    if unset := re.search(r"\$\{\w+\}", value):
        raise UserError(f"{unset[0]} is no environment variable; set it")
    return value


# a path or URL, in which ~ and $NAME are replaced; without secrets, because it is saved in the output
Place = Annotated[str, AfterValidator(place)]


_NAMES = re.compile(r"(password|passwd|pwd|secret|token|credential|api_?key)[^=&;]*=", re.I)


def _endpoint(value: str) -> str:
    if "@" in value or _NAMES.search(value):
        raise holds_secret()
    return value


Endpoint = Annotated[Place, AfterValidator(_endpoint)]  # a server's URL
