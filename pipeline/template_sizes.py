"""How large a template's values are, and how large what a filter or method is about to make of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

CHARACTERS = 2**23  # of any one value: a context of a million tokens is half of that
ITEM = 16  # characters that an item of a list counts for, whatever it is
INTEGER_BITS = 2**16
_SMALL = 4000  # the largest power of ten, of digits to round to
_NUMBERS = re.compile(r"\d+")


class TooLarge(jinja2.TemplateRuntimeError):
    """A template makes more than the bounds allow."""


def weigh(value: Any) -> int:
    """Characters of a value, with all that lies in it; TooLarge if they are too many."""
    if isinstance(value, str | bytes):
        return len(value)
    total, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, int):
            if one.bit_length() > INTEGER_BITS:
                raise too_large()
        elif isinstance(one, Mapping):
            total += ITEM * len(one)
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            total += ITEM * len(one)
            left += one
        if total > CHARACTERS:
            raise too_large()
    return total


def too_large() -> TooLarge:
    return TooLarge(f"makes more than {CHARACTERS:,} characters")


def refuse_above(most: int, size: int) -> None:
    if size > most:
        raise too_large()


def _ints(values: Iterable[Any]) -> int:
    return sum(abs(one) for one in values if isinstance(one, int))


def repeated(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return CHARACTERS + 1 if left.bit_length() + right.bit_length() > INTEGER_BITS else 0
    if isinstance(left, int):
        left, right = right, left
    return weigh(left) * max(right, 0) if isinstance(right, int) else 0


def formatted(form: Any, *values: Any) -> int:
    """Widths and precisions of a form, and the largest value as often as there are places."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    widths = sum(int(one[:12]) for one in _NUMBERS.findall(text))
    places = text.count("%") + text.count("{")
    nested = sum(map(_all_ints, values)) if "*" in text or re.search(r"{[^{}]*{", text) else 0
    return len(text) + widths + places * (nested + max(map(weigh, values), default=0))


def _all_ints(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    return _ints(inner)


def _padded(first: Any, *others: Any) -> int:
    return weigh(first) + _ints([first, *others])


def _per_line(first: Any, *others: Any) -> int:
    text = str(first)
    widths = _ints(others) + sum(len(one) for one in others if isinstance(one, str))
    return len(text) + (text.count("\n") + text.count("\t") + 1) * max(widths, 8)


def _multiplied(first: Any, *others: Any) -> int:
    return weigh(first) * (1 + _ints(others) + sum(weigh(one) for one in others))


def _wrapped(first: Any, *others: Any) -> int:
    return weigh(first) * (1 + sum(len(one) for one in others if isinstance(one, str)))


def _replaced(first: Any, *others: Any) -> int:
    if len(others) < 2 or isinstance(first, bytes):  # too few are an error of the method's own
        return _multiplied(first, *others)
    first, old = str(first), str(others[0])
    new = others[1] if isinstance(others[1], str | bytes) else str(others[1])
    found: int = first.count(old)
    return len(first) + found * len(new)


def _joined(between: Any, items: Any = (), *_: Any) -> int:
    count = len(items) if hasattr(items, "__len__") else CHARACTERS
    return count * len(str(between)) + (weigh(items) if hasattr(items, "__len__") else 0)


def _rounded(_: Any, *others: Any) -> int:
    return CHARACTERS + 1 if _ints(others) > _SMALL else 0


def _summed(_: Any, *others: Any) -> int:
    return CHARACTERS + 1 if any(isinstance(one, list | tuple) for one in others) else 0


def _searched(first: Any, *others: Any) -> int:
    return weigh(first) * sum(weigh(one) for one in others) >> 8  # of the order of n × m: time, not size


# filters and methods that make much out of little -> the characters they are about to make, at most
ESTIMATES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), _padded),
    **dict.fromkeys(("indent", "expandtabs"), _per_line),
    **dict.fromkeys(("tojson", "translate"), _multiplied),
    **dict.fromkeys(("format", "format_map"), formatted),
    **dict.fromkeys(("rfind", "rindex", "rsplit", "rpartition"), _searched),
    "wordwrap": _wrapped,
    "replace": _replaced,
    "join": _joined,
    "round": _rounded,
    "sum": _summed,
}
