"""Describes every key of every configuration file, for `skipdecode keys` and for configs/README.md."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from actors.engine.errors import UserError, nearest
from pipeline.config.base import Section, section_of
from pipeline.config.job import JobConfig
from pipeline.config.serve import ServeConfig

FILES: dict[str, type[Section]] = {
    "Job files: `run`, `try`, `plan`, `adapt`, `evaluate`, `report`": JobConfig,
    "Serving files: `serve`": ServeConfig,
}
WORDS = {  # name of a type -> the words that describe it
    "str": "text", "int": "whole number", "float": "number", "bool": "true or false",
    "Any": "any value", "dict": "keys", "OutputFormat": "keys and values"
}  # fmt: skip


def described(section: str | None = None) -> str:
    """Describe all keys, the keys of one section such as `input`, or one key. Raise UserError for an unknown name."""
    found: dict[str, str] = {}  # key -> description; a key that several kinds of files have is listed once
    for model in FILES.values():
        for key, field in leaves(model):
            if section is None or key == section or key.startswith((f"{section}.", f"{section}[].")):
                default = default_of(field)
                given = {"-": "", "required": "  required"}.get(default, f"  default {default}")
                meaning = textwrap.indent(textwrap.fill(field.description or "", 100), "    ")
                found.setdefault(key, f"{key}  ({kind_of(field.annotation)}){given}\n{meaning}")
    if not found:
        sections = sorted({key.partition(".")[0] for model in FILES.values() for key, _ in leaves(model) if "." in key})
        names = [*sections, *(key for model in FILES.values() for key, _ in leaves(model))]
        near = nearest(section, names) or f"sections: {', '.join(sections)}"
        raise UserError(f"{section}: no such section or key; {near}")
    return "\n".join(found.values())


def leaves(model: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of each key in a model and in its nested sections."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield f"{path}{name}", field
        else:
            yield from leaves(section, f"{path}{name}{'[]' * in_list(field)}.")


def in_list(field: FieldInfo) -> bool:
    """Return whether a field holds a list."""
    return any(get_origin(part) is list for part in parts(field.annotation))


def parts(annotation: Any) -> tuple[Any, ...]:
    """Return the types in a union, without None; for any other type, return a tuple with this type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(entry for entry in get_args(annotation) if entry is not type(None))
    return (annotation,)


def kind_of(annotation: Any) -> str:
    """Return a type in words, such as `list of text`."""
    names = []
    for part in parts(annotation):
        origin = get_origin(part)
        if origin is Literal:
            names += [str(value) for value in get_args(part)]
        elif hasattr(part, "__metadata__"):  # Annotated
            names.append(kind_of(part.__origin__))
        elif origin in (list, tuple):
            inner = kind_of(get_args(part)[0]) if get_args(part) else "any value"
            names.append(f"list of {inner}")
        elif origin is dict:
            names.append("keys and values")
        else:
            name = getattr(part, "__name__", str(part))
            names.append(WORDS.get(name, name))
    return " or ".join(dict.fromkeys(names))


def default_of(field: FieldInfo) -> str:
    """Return a key's default as YAML writes it; `required` if the key must be given, `-` if the default is None."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
