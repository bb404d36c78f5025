"""Bounds on what one row's template may do: seconds of work, and characters that it makes.

Templates come with job files and checkpoints, values with data: none of them may stop a job, or take its memory.
Each operation that can make something large out of something small is looked at before it is done; what is left,
loops and recursion, is ended by a watchdog.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # processor seconds of one row's template: another process's load must not fail a row
CHARACTERS = 2**23  # of any one value: a context of a million tokens is half of that
WORK = 2**28  # characters of all values that one row's template makes on its way
ITEM = 16  # characters that an item of a list counts for, whatever it is
INTEGER_BITS = 2**16
_POLL_SECONDS = 0.1
_SMALL = 4000  # the largest power of ten, of digits to round to
_NUMBERS = re.compile(r"\d+")

T = TypeVar("T")


class TooLarge(jinja2.TemplateRuntimeError):
    """A template makes more than the bounds allow."""


class OutOfBounds(ValueError):
    """A row's template takes too long or makes too much; in one line."""


class OutOfTime(BaseException):
    """Raised in the midst of a template by the watchdog; nothing on the way up may take it for its own."""


@dataclass(eq=False)
class _Run:
    """A template at work. made: characters so far. ended: the watchdog has sent `OutOfTime`."""

    made: int = 0
    ended: bool = False


_lock = threading.Lock()
_running: dict[int, _Run] = {}  # thread -> its run
_watching = False


def bounded(action: Callable[[], T]) -> T:
    """The action's value. OutOfBounds if its templates take too long or make too much."""
    global _watching
    thread, run = threading.get_ident(), _Run()
    if thread in _running:  # compiled within the run of the first row
        return action()
    with _lock:
        _running[thread] = run
        if not _watching:
            _watching = True
            threading.Thread(target=_watch, name="template-watchdog", daemon=True).start()
    try:
        try:
            return action()
        finally:
            with _lock:
                _running.pop(thread, None)
            if run.ended:
                time.sleep(0.01)  # an end that was sent too late comes here, and not in somebody else's code
    except OutOfTime:
        _running.pop(thread, None)
        raise OutOfBounds(f"takes more than {SECONDS:g} seconds") from None
    except TooLarge as error:
        raise OutOfBounds(str(error)) from None


def _watch() -> None:
    """Send `OutOfTime` into threads whose template has worked for too long."""
    seen: dict[int, tuple[_Run, float]] = {}  # thread -> its run, and the thread's seconds when it was first seen
    while True:
        time.sleep(_POLL_SECONDS)
        with _lock:
            for thread, run in _running.items():
                worked = time.clock_gettime(time.pthread_getcpuclockid(thread))
                before, began = seen.get(thread, (None, 0.0))
                if before is not run:
                    seen[thread] = run, worked
                elif worked - began > SECONDS:
                    run.ended = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))


class _Generator(CodeGenerator):
    """Literals and `~` through the bounds: a list of a list twice, in a macro that calls itself, would double."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.text((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._kept(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._kept(super().visit_Tuple, node, frame, node.items)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._kept(super().visit_Dict, node, frame, [half for pair in node.items for half in (pair.key, pair.value)])

    def _kept(self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame, items: list[Any]) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
        else:
            self.write("environment.keep(")
            visit(node, frame)
            self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose values have bounds: `CHARACTERS` each, `WORK` in all."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    is_bound = False

    def from_string(self, *args: Any, **kwargs: Any) -> jinja2.Template:
        if not self.is_bound:
            self._bound()
        return super().from_string(*args, **kwargs)

    def _bound(self) -> None:
        """Put the bounds on filters and globals; once, when they are all there."""
        self.is_bound = True
        self.filters = {name: _bounded_filter(name, one) for name, one in self.filters.items() if name != "random"}
        self.globals.pop("lipsum", None)  # draws at random, as the filter does: a row must always give one prompt
        space = self.globals.get("namespace")
        if isinstance(space, type):  # else its text shows what it holds, which may be a tower of others
            self.globals["namespace"] = type("Namespace", (space,), {"__repr__": lambda _: "<Namespace>"})

    def keep(self, value: T) -> T:
        """The value, if it is within the bounds; TooLarge if it is not."""
        _charge(weigh(value))
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """What the library joins with: a template's output, a macro's, a block's."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > CHARACTERS:
                raise _too_large()
            found.append(piece)
        _charge(size)
        return "".join(found)

    def text(self, values: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        return self.concat(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _refuse_above(CHARACTERS, _times(left, right))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > INTEGER_BITS:
                raise _too_large()
        elif operator == "%" and isinstance(left, str | bytes):
            _refuse_above(CHARACTERS, _formatted(left, right))
        return self.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        name = getattr(__obj, "__name__", None)
        if name in _ESTIMATES:
            method = getattr(__obj, "__wrapped__", __obj)  # the sandbox's own, around a text's format
            _refuse_above(CHARACTERS, _ESTIMATES[name](getattr(method, "__self__", None), *args, *kwargs.values()))
        return __self.keep(super().call(__context, __obj, *args, **kwargs))


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
                raise _too_large()
        elif isinstance(one, Mapping):
            total += ITEM * len(one)
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            total += ITEM * len(one)
            left += one
        if total > CHARACTERS:
            raise _too_large()
    return total


def _too_large() -> TooLarge:
    return TooLarge(f"makes more than {CHARACTERS:,} characters")


def _refuse_above(most: int, size: int) -> None:
    if size > most:
        raise _too_large()


def _charge(size: int) -> None:
    _refuse_above(CHARACTERS, size)
    run = _running.get(threading.get_ident())
    if run is not None:
        run.made += size
        if run.made > WORK:
            raise TooLarge(f"makes more than {WORK:,} characters on its way")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    estimate = _ESTIMATES.get(name)
    context = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that the library puts in front

    @wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        if estimate is not None:
            given = list(args)
            if name == "join" and not hasattr(given[context], "__len__"):
                given[context] = list(given[context])
                args = tuple(given)
            values = [*given[context:], *kwargs.values()]
            if name == "join":  # as the method: what lies between comes first
                between = kwargs.get("d", given[context + 1] if len(given) > context + 1 else "")
                values = [between, given[context]]
            _refuse_above(CHARACTERS, estimate(*values))
        found = function(*args, **kwargs)
        _charge(weigh(found))
        return found

    return within


def _ints(values: Iterable[Any]) -> int:
    return sum(abs(one) for one in values if isinstance(one, int))


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return CHARACTERS + 1 if left.bit_length() + right.bit_length() > INTEGER_BITS else 0
    if isinstance(left, int):
        left, right = right, left
    return weigh(left) * max(right, 0) if isinstance(right, int) else 0


def _formatted(form: Any, *values: Any) -> int:
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
_ESTIMATES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), _padded),
    **dict.fromkeys(("indent", "expandtabs"), _per_line),
    **dict.fromkeys(("tojson", "translate"), _multiplied),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("rfind", "rindex", "rsplit", "rpartition"), _searched),
    "wordwrap": _wrapped,
    "replace": _replaced,
    "join": _joined,
    "round": _rounded,
    "sum": _summed,
}
