"""A text's methods `format` and `format_map` in a template: sandboxed as jinja2's, and filled up to the bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from string import Formatter
from typing import Any

from jinja2 import Environment
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from pipeline.prepare.template_sizes import CHARACTERS, numbers, refuse_above


class _Bounded(Formatter):
    """One field after the other; TooLarge before one that is too wide, and after those that are too much together."""

    made = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        refuse_above(CHARACTERS, numbers(format_spec))
        text = str(super().format_field(value, format_spec))
        self.made += len(text)
        refuse_above(CHARACTERS, self.made)
        return text


class _Fields(_Bounded, SandboxedFormatter):
    pass


class _EscapedFields(_Bounded, SandboxedEscapeFormatter):
    pass


def filled(environment: Environment, method: Any) -> Callable[..., str]:
    """What a template calls in place of a text's method."""
    form, is_map = method.__self__, method.__name__ == "format_map"

    def within(*args: Any, **kwargs: Any) -> str:
        if is_map:
            (kwargs,), args = args, ()
        if isinstance(form, Markup):
            fields: Formatter = _EscapedFields(environment, escape=form.escape)
        else:
            fields = _Fields(environment)
        text: str = type(form)(fields.vformat(form, args, kwargs))
        return text

    return update_wrapper(within, method)
