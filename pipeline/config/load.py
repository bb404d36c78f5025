"""Reads a YAML 1.2 file into a pydantic model, and applies changes by `--set`. Every error message is one line."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from actors.engine.errors import UserError, flat, suggestion
from pipeline.config.base import SECRET, section_of, text_of
from pipeline.messages import check_unicode, counted, shortened, without_secrets

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def parse_yaml(text: str) -> Any:
    """Return the values in a YAML 1.2 document. In YAML 1.2, yes and no are text, and 1e-5 is a number.

    Raises a one-line UserError if the document is invalid or a key occurs twice.
    """
    try:
        return _yaml().load(io.StringIO(text))
    except RecursionError:
        raise UserError("nested too deeply") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = flat(error.problem or error.context).partition(" with value")[0]
        hint = "indent with spaces, and put a text with special characters ({{ * % @ : #) in quotes"
        raise UserError(without_secrets(f"{where}{problem}; {hint}")) from None
    except Exception as error:  # a tag that does not fit its value raises errors of many classes
        raise UserError(without_secrets(flat(error) or f"invalid ({type(error).__name__})")) from None


def dump_yaml(values: dict[str, Any]) -> str:
    """Return a YAML document that `parse_yaml` reads back as the same values."""
    text = ""
    for readable in (True, False):  # escape non-ASCII characters only if the first text does not read back as `values`
        stream, yaml = io.StringIO(), _yaml()
        yaml.allow_unicode = readable
        yaml.width = 120 if readable else 2**31  # the library may add a space where it wraps an escaped text
        yaml.dump(values, stream)
        text = stream.getvalue()
        if _yaml().load(io.StringIO(text)) == values:
            break
    return text


def _yaml() -> Any:  # not `YAML`, because the library's annotations are wrong
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def load_config(kind: type[ConfigT], path: str | Path, changes: Sequence[str] = ()) -> ConfigT:
    """Read a YAML file, apply ``a.b=value`` changes, and return the validated model.

    Raises a UserError that names the file, the key and the remedy.
    """
    return validated(kind, load_values(path, changes), str(path))


def validated(kind: type[ConfigT], values: dict[str, Any], source: str) -> ConfigT:
    """Return the values as a model of class `kind`. Raises UserError with a message that begins with `source`."""
    try:
        check_unicode(values)
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_problem(kind, error)}") from None
    except RecursionError:
        raise UserError(f"{source}: an alias contains itself, or values are nested too deeply") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def load_values(path: str | Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file, apply ``a.b=value`` changes, and return its values without validation. Raises UserError."""
    text = text_of(path)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold keys and values, such as `input:` and `output:`")
    return changed(values, changes)


def changed(values: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply the ``a.b=value`` changes to `values`, and return them. Raises UserError if a change is not valid.

    A number, true, false, null, and text in brackets or quotes are read as YAML. Any other text is kept as it is.
    """
    for change in changes:
        dotted, equals, text = change.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"--set {without_secrets(change)}: must look like section.key=value")
        node = values
        for key in keys[:-1]:
            if node.get(key) is None:  # the key is missing, or its section is empty
                node[key] = {}
            node = node[key]
            if not isinstance(node, dict):
                raise UserError(f"--set {without_secrets(change)}: {key} is not a section")
        node[keys[-1]] = _value_of(text.strip())
    return values


def _value_of(text: str) -> Any:
    """Return the value of a change. YAML would drop comments, and read `a: b` as a section, in any other text."""
    try:
        value = parse_yaml(text)
    except ValueError:
        return text
    is_yaml = isinstance(value, int | float) or text[:1] in ("[", "{", "'", '"')
    return value if is_yaml or text.lower() in ("", "~", "null") else text


def _first_problem(kind: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors()
    problem = next((entry for entry in problems if entry["type"] == "extra_forbidden"), problems[0])
    inner = ("function-", "list[", "literal[")  # pydantic adds names of a union's types to the keys
    where = [str(part) for part in problem["loc"] if not str(part).startswith(inner)]
    where = [part for part in where[:-1] if not part.endswith("Config")] + where[-1:]
    key = shortened(".".join(part if part.isprintable() else repr(part) for part in where), 200)
    more = f" (and {counted(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        section = kind
        for name in where[:-1]:  # for an index in a list of sections, the section stays the same
            section = section_of(getattr(section.model_fields.get(name), "annotation", None)) or section
        return f"unknown key {key}; {suggestion(where[-1], list(section.model_fields))}{more}"
    if problem["type"] == "missing":
        return f"{key} is missing; give it a value{more}"
    if problem["type"] == "model_type":
        return f"{key} must be a section with keys of its own; see `skipdecode keys {where[0]}`{more}"
    message = problem["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
    given = problem.get("input")
    is_shown = isinstance(given, str | int | float | bool | None) and problem["type"] != SECRET
    shown = f", not {_shown(given)}" if is_shown else ""
    return f"{key}: {message[0].lower()}{message[1:]}{shown}{more}" if key else f"{message}{more}"


def _shown(given: Any) -> str:
    """Return a value as text for an error message: without secrets, and cut off if it is long."""
    is_huge = isinstance(given, int) and given.bit_length() >= 256
    return shortened(without_secrets("a huge number" if is_huge else repr(given)), 200)
