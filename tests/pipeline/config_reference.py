"""Write every key of every file, with its type, default and unit, into configs/README.md, from the config models.

.venv/bin/python tests/pipeline/config_reference.py    # rewrites the tables in configs/README.md
"""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config.evaluate import EvalConfig
from pipeline.config.job import JobConfig
from pipeline.config.serve import ServeConfig
from pipeline.config.tune import TuneConfig

README = Path(__file__).parents[2] / "configs" / "README.md"
BETWEEN = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.S)
FILES = {
    "Job files: `run`, `try`, `plan`, `adapt`, `report`": JobConfig,
    "Training files: `tune`": TuneConfig,
    "Evaluation files: `evaluate`": EvalConfig,
    "Serving files: `serve`": ServeConfig,
}
WORDS = {
    "str": "text", "SecretStr": "text", "int": "whole number", "float": "number", "bool": "true or false",
    "Any": "any value", "dict": "keys"
}  # fmt: skip


def parts(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, None left out; a type alone is one."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(entry for entry in get_args(annotation) if entry is not type(None))
    return (annotation,)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone or in a list."""
    for part in parts(annotation):
        for kind in (part, *get_args(part)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return kind
    return None


def kind_of(annotation: Any) -> str:
    """A type in words."""
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
            names.append(WORDS.get(name, "keys and values" if name == "OutputFormat" else name))
    return " or ".join(dict.fromkeys(names))


def default_of(field: FieldInfo) -> str:
    """A default as YAML would hold it; required without one."""
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.get_default(call_default_factory=True)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tables(model: type[BaseModel], seen: set[str], path: str = "") -> list[str]:
    """Return the lines of a section's table, and after it those of the sections below it.

    seen: rows of the files before, which are left out; the rows of this file are added.
    """
    lines, below = [], []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            dotted = f"{path}{name}"
            in_list = "[]" if any(get_origin(part) is list for part in parts(field.annotation)) else ""
            purpose = field.description or (section.__doc__ or "").strip().partition("\n")[0]
            purpose = "" if section.__doc__ == BaseModel.__doc__ else purpose
            state = "required" if field.is_required() else "optional"
            sentence = f"{state.capitalize()}. {purpose[:1].upper()}{purpose[1:]}".strip()
            below += ["", f"#### `{dotted}{in_list}`", "", sentence, ""]
            below += tables(section, seen, f"{dotted}{in_list}.")
            continue
        text = (field.description or "").replace("|", r"\|").replace("\n", " ")
        kind = kind_of(field.annotation).replace("|", r"\|")
        default = default_of(field).replace("|", r"\|")
        lines.append(f"| `{path}{name}` | {kind} | {'' if default == '-' else f'`{default}`'} | {text} |")
    keys = {line.replace(f"`{path}", "`", 1) if path.endswith("[].") else line for line in lines}
    if path.endswith("[].") and keys <= {line.replace("`schedule.", "`", 1) for line in seen}:
        return ["Keys as in the section `schedule` of job files."]
    new = [line for line in lines if line not in seen]
    seen |= set(lines)
    head = ["| key | type | default | meaning and unit |", "|---|---|---|---|"] if new else []
    if len(new) < len(lines):
        others = "Further keys" if new else "All keys"
        head = [f"{others} as in the section of this name above.", *([""] if new else []), *head]
    return [*head, *new, *below]


def reference() -> str:
    """The generated part of configs/README.md."""
    lines: list[str] = []
    seen: set[str] = set()
    for title, model in FILES.items():
        lines += ["", f"### {title}", "", *tables(model, seen)]
    return "\n".join(lines) + "\n\n"


def current() -> str:
    """The README with the tables as the models give them."""
    return BETWEEN.sub(lambda _: reference(), README.read_text())


if __name__ == "__main__":
    README.write_text(current())
