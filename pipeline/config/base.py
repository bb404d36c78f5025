"""Defines the base class of all sections of configuration files: a pydantic model that refuses unknown keys."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from actors.engine.errors import UserError
from pipeline.messages import where_sought, without_secrets

log = logging.getLogger(__name__)


class Section(BaseModel):
    """A section of a configuration file. Unknown keys and wrong types are errors. A float key accepts whole numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    renamed: ClassVar[dict[str, str]] = {}  # old key -> new key, with advice where needed
    removed: ClassVar[dict[str, tuple[Any, str]]] = {}  # key -> its last default; advice for users of other values

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if name in cls.renamed:
                raise UserError(f"{name} is now {cls.renamed[name]}")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{name} must be below 2^63")
            if name in cls.removed and value != cls.removed[name][0]:
                raise UserError(f"{name} was removed: {cls.removed[name][1]}")
            if name in cls.removed:
                log.warning("the key %s was removed and is ignored; leave it out", name)
        kept = {name: value for name, value in values.items() if name not in cls.removed}
        return {name: {} if value is None and cls._is_section(name) else value for name, value in kept.items()}

    @classmethod
    def _is_section(cls, name: str) -> bool:
        """Return whether the key holds a section. YAML reads a section whose keys are all comments as null."""
        kind = getattr(cls.model_fields.get(name), "annotation", None)
        return isinstance(kind, type) and issubclass(kind, Section)


def without_removed(stored: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Return recorded values, except keys that this version no longer has and whose value is their last default.

    So a job that an earlier version recorded can be resumed.
    """
    kept: dict[str, Any] = {}
    for key, value in stored.items():
        if key in section.removed and value == section.removed[key][0]:
            continue
        nested = section_of(section.model_fields[key].annotation) if key in section.model_fields else None
        kept[key] = without_removed(value, nested) if nested is not None and isinstance(value, Mapping) else value
    return kept


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
