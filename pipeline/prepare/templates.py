"""Renders Jinja templates with a row's values, in a sandbox. Refuses missing values. Caches compiled templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.engine.errors import UserError
from pipeline.messages import listed, one_line

NULL = "a null is printed; if null is allowed, write {{ column or '' }}"
# filters that do not print null or bytes
TAKE_NULL = {"count", "d", "default", "float", "int", "length", "pprint", "tojson"}


class _Environment(ImmutableSandboxedEnvironment):
    """Renders templates. If the struct `meta` has a field `items`, `meta.items` is this field, not a Python method.

    `range` is the only Jinja global that is kept, because columns may have the names of other globals. The filter
    `random` is removed, because a row must always give the same prompt. `tojson` does not escape for HTML.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.filters["random"]
        self.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self.filters["printable"] = _printable
        self.globals = {"range": self.globals["range"]}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


@lru_cache(maxsize=16)
def compile_template(text: str) -> jinja2.Template:
    """Compile a sandboxed template that refuses undefined names. Raises UserError if the text does not compile."""
    environment = _Environment(undefined=jinja2.StrictUndefined, autoescape=False, finalize=_printable)
    try:
        tree = environment.parse(text)
        for node in list(tree.find_all((nodes.Filter, nodes.Concat))):
            _check_operands(node)
        tree.set_environment(environment)
        return environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        remedy = "; rename a column whose name is not one word" if "statement', got" in str(error.message) else ""
        raise UserError(f"line {error.lineno}: {error.message}{remedy}") from None
    except Exception as error:  # for example a RecursionError or a SyntaxError, if the template is nested too deeply
        raise UserError(f"cannot be compiled: {one_line(error)}") from None


def _check_operands(node: nodes.Expr) -> None:
    """Check the operands of a filter or of `~` like printed values, because Jinja turns their nulls into "None"."""
    if isinstance(node, nodes.Concat):
        node.nodes = [_filtered(one, "printable") for one in node.nodes]
    elif isinstance(node, nodes.Filter) and node.node is not None and node.name not in TAKE_NULL:
        check = ("map", nodes.Const("printable")) if node.name == "join" else ("printable",)  # join prints each item
        node.node = _filtered(node.node, *check)
        if node.name in ("format", "join", "replace"):  # these print their arguments
            node.args = [_filtered(one, "printable") for one in node.args]


def _filtered(value: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


def _printable(value: Any) -> Any:
    """Return a value that a template prints, unchanged.

    Raises UndefinedError if the value is null, bytes, a method or a function.
    """
    if value is None:  # Jinja would print "None"
        raise jinja2.UndefinedError(NULL)
    if isinstance(value, bytes):  # Jinja would print "b'...'"
        raise jinja2.UndefinedError("binary data is printed, not text; write {{ column.decode() }}")
    if callable(value) and not isinstance(value, jinja2.Undefined):  # if `meta` is text, meta.title is a Python method
        raise jinja2.UndefinedError("a method or function is printed, not a value of the row; is the column a struct?")
    return value


def is_template(text: str) -> bool:
    """Tell whether a text contains Jinja's braces and so is a template. `input.template` is always one."""
    return any(mark in text for mark in ("{{", "{%", "{#"))


def template_columns(text: str) -> list[str]:
    """Return the names of the columns that a template reads, sorted. Raises UserError if the text does not compile."""
    compile_template(text)
    environment = _Environment()
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(text)))


def render(text: str, row: Mapping[str, Any]) -> str:
    """Fill the template `text` with the values of one row. Raises UserError if that fails."""
    try:
        return compile_template(text).render(row)
    except Exception as error:  # filters and methods raise errors of any class; `truncate(2)` an AssertionError
        problem = one_line(error).removeprefix("UndefinedError: ")
        if NULL in problem and (nulls := _nulls(text, row)):
            problem += f" (null here: {listed(nulls)})"
        words = set(re.findall(r"\w+", problem))
        if isinstance(error, TypeError) and "str" in words and words & {"int", "float"}:
            problem += "; a column of a CSV file is text: write {{ column | int }} or {{ column | float }}"
        raise UserError(f"template: {problem}") from None


def _nulls(text: str, row: Mapping[str, Any]) -> list[str]:
    """Return the names in a template, such as `author.country`, whose values in the row are null."""
    nulls = []
    for name in dict.fromkeys(re.findall(r"[^\W\d]\w*(?:\.\w+)*", text)):
        value: Any = row
        for key in name.split("."):
            value = value.get(key, "") if isinstance(value, Mapping) else value
        if value is None:
            nulls.append(name)
    return nulls
