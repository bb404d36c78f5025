"""How large a template's values are, and how large what a filter or method is about to make of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from sys import getsizeof
from typing import Any

import jinja2
from markupsafe import Markup

CHARACTERS = 2**23  # of any one value: a context of a million tokens is half of that
ITEM = 24  # characters that a list or a mapping counts for, beside what lies in it
LEAF = 4  # and what is no text, at least
INTEGER_BITS = 2**16
_FLOAT = 310  # digits of the largest
_SMALL = 4000  # the largest power of ten, of digits to round to
_NUMBERS = re.compile(r"\d+")
_TEXTS = {str, bytes, Markup}
_FLAT: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # what `splitlines` cuts at


class TooLarge(jinja2.TemplateRuntimeError):
    """A template makes more than the bounds allow."""


def measure(value: Any) -> tuple[int, int]:
    """Characters and bytes of a value, with all that lies in it; TooLarge if the characters are too many."""
    if isinstance(value, str | bytes):
        return len(value), getsizeof(value)
    characters, memory, left = 0, 0, [value]
    while left:
        one = left.pop()
        memory += getsizeof(one)
        if isinstance(one, str | bytes):
            characters += max(1, len(one))
        elif isinstance(one, int):
            refuse_above(INTEGER_BITS, one.bit_length())
            characters += max(LEAF, one.bit_length() // 3)
        elif isinstance(one, _FLAT):
            if len(one) > ITEM and set(map(type, one)) <= _TEXTS:  # a document's words: they pass without a loop
                characters += max(len(one), sum(map(len, one)))
                memory += sum(map(getsizeof, one))
            else:
                characters += ITEM
                left += one
        elif isinstance(one, Mapping):
            characters += ITEM
            left += one.keys()
            left += one.values()
        else:
            characters += LEAF
        refuse_above(CHARACTERS, characters)
    return characters, memory


def weigh(value: Any) -> int:
    """Characters of a value, with all that lies in it; TooLarge if they are too many."""
    return measure(value)[0]


def too_large() -> TooLarge:
    return TooLarge(f"makes more than {CHARACTERS:,} characters")


def refuse_above(most: int, size: int) -> None:
    if size > most:
        raise too_large()


def numbers(text: str) -> int:
    """Sum of the numbers in a text: widths, precisions."""
    return sum(map(int, _NUMBERS.findall(text)))


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def repeated(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return CHARACTERS + 1 if left.bit_length() + right.bit_length() > INTEGER_BITS else 0
    if isinstance(left, int):
        left, right = right, left
    return weigh(left) * max(right, 0) if isinstance(right, int) else 0


_BRACKETS = re.compile(r"[()]")
_PLACE = re.compile(r"[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.?)", re.DOTALL)


def _places(form: str) -> Iterator[tuple[str | None, re.Match[str]]]:
    """Name, and width, precision and kind, of each place in a form for `%`."""
    start = form.find("%")
    while start >= 0:
        end, name, depth = start + 1, None, 0
        for bracket in _BRACKETS.finditer(form, end) if form.startswith("(", end) else ():  # a name may hold brackets
            depth += 1 if bracket[0] == "(" else -1
            if not depth:
                name, end = form[end + 1 : bracket.start()], bracket.end()
                break
        place = _PLACE.match(form, end)
        assert place is not None  # it may be empty
        yield name, place
        start = form.find("%", place.end())


def printed(form: Any, values: Any) -> int:
    """`form % values`: each value once, or as often as it is named, and the widths and precisions of the form."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    left = iter(values if isinstance(values, tuple) else (values,))
    size = len(text)
    for name, place in _places(text):
        for count in place.group(1, 2):
            size += _number(next(left, 0)) if count == "*" else int(count or 0)
        if place[3] != "%":
            value = next(left, "") if name is None else values.get(name, "") if isinstance(values, Mapping) else ""
            size += _FLOAT if isinstance(value, float) else weigh(value)
        refuse_above(CHARACTERS, size)
    return size


def _print_filter(form: Any, *values: Any, **named: Any) -> int:
    return printed(form, named or values)


def _padded(first: Any, width: Any = 80, *_: Any, **named: Any) -> int:
    return weigh(first) + _number(named.get("length", width))


def _cut(items: Any, count: Any = 0, *_: Any, **named: Any) -> int:
    return weigh(items) + ITEM * max(map(_number, [count, *named.values()]))


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    text = str(value)
    lines = sum(map(text.count, _BREAKS)) - text.count("\r\n") + 1
    step = len(width) if isinstance(width, str) else _number(width)
    return len(text) + lines * step


def _tabs_expanded(text: str | bytes, tabsize: Any = 8) -> int:
    tabs = text.count(b"\t") if isinstance(text, bytes) else text.count("\t")
    return len(text) + tabs * _number(tabsize)


def _json(value: Any, *others: Any, **named: Any) -> int:
    """Each item stands on a line of its own, as far in as it is deep."""
    given = [*others, *named.values()]
    step = sum(len(one) if isinstance(one, str) else _number(one) for one in given)
    between = sum(len(str(one)) for two in given if isinstance(two, list | tuple) for one in two)
    size, left = weigh(value), [(value, 1)]
    while left:
        one, depth = left.pop()
        items = one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
        size += (len(items) + 1) * (depth * step + between)
        refuse_above(CHARACTERS, size)
        left += ((item, depth + 1) for item in items if isinstance(item, Mapping | list | tuple))
    return size


def _translated(text: Any, table: Any = (), *_: Any, **__: Any) -> int:
    if isinstance(text, bytes):
        return len(text)
    size = len(text)
    pairs = table.items() if isinstance(table, Mapping) else enumerate(table) if isinstance(table, list | tuple) else ()
    for key, new in pairs:
        if isinstance(new, str) and isinstance(key, int) and 0 <= key < 0x110000:
            size += text.count(chr(key)) * (len(new) - 1)
    return size


def _wrapped(value: Any, width: Any = 79, _long: Any = True, wrapstring: Any = None, *_: Any, **__: Any) -> int:
    text = str(value)
    lines = 2 * len(text) // max(1, _number(width)) + sum(map(text.count, _BREAKS)) + 1
    return len(text) + lines * len(wrapstring or "\n")


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    if not isinstance(text, bytes):
        text, old = str(text), str(old)
    found: int = text.count(old)
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    return len(text) + found * (len(new if isinstance(new, bytes) else str(new)) - len(old))


def _join_filter(items: Any, d: Any = "", attribute: Any = None) -> int:
    return _joined(str(d), items)


def _joined(between: Any, items: Any = ()) -> int:
    return len(items) * len(between) + weigh(items) if hasattr(items, "__len__") else 0


def _rounded(_value: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    return CHARACTERS + 1 if _number(precision) > _SMALL else 0


def _summed(_items: Any, *others: Any, **named: Any) -> int:
    return CHARACTERS + 1 if any(isinstance(one, list | tuple) for one in (*others, *named.values())) else 0


def _searched(text: str | bytes, *others: Any) -> int:
    return len(text) * sum(len(one) for one in others if isinstance(one, str | bytes)) >> 8  # time: of the order n × m


# the characters that a filter is about to make, at most; it is called with the filter's arguments
FILTERS: dict[str, Callable[..., int]] = {
    "batch": _cut,
    "center": _padded,
    "format": _print_filter,
    "indent": _indented,
    "join": _join_filter,
    "replace": _replaced,
    "round": _rounded,
    "slice": _cut,
    "sum": _summed,
    "tojson": _json,
    "wordwrap": _wrapped,
}

# and the methods of texts and numbers
METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    **dict.fromkeys(("rfind", "rindex", "rsplit", "rpartition"), _searched),
    "expandtabs": _tabs_expanded,
    "join": _joined,
    "replace": _replaced,
    "translate": _translated,
}
