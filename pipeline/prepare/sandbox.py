"""jinja2's sandbox with bounds on time and size: no template stops a job.

Operations that multiply text are estimated before they run, every result is measured, and a watchdog ends a template
that runs for too long. A template that still takes all memory ends its worker process, and the row is quarantined.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper, wraps
from typing import Any, TypeVar

import jinja2
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

SECONDS = 5.0  # processor time of one row's template: the load of other processes must not fail a row
CHARACTERS = 2**23  # of one value, with all that it contains; a context of a million tokens is half of that
TOTAL = 2**31  # characters of all texts that one row's template makes
ITEM_CHARACTERS = 24  # what a list or a mapping counts, apart from its items
INTEGER_BITS = 2**16
_POLL_SECONDS = 0.1

T = TypeVar("T")


class OutOfBounds(ValueError):
    """A row's template takes too long or makes too much; one line."""


class OutOfTime(BaseException):
    """Raised inside a template by the watchdog; no handler on the way up may catch it by accident."""


class TooLarge(jinja2.TemplateRuntimeError):
    """A template makes more than the bounds allow."""


class _Run:
    """A template that runs in a thread: its deadline on the thread's clock, and the characters made so far."""

    def __init__(self, thread: int) -> None:
        self.deadline = _processor_seconds(thread) + SECONDS
        self.made = 0


_lock = threading.Lock()  # a thread ends only after its run has been removed: its clock can be read under the lock
_runs: dict[int, _Run] = {}
_watchdog: threading.Thread | None = None


def bounded(action: Callable[[], T]) -> T:
    """The action's value. Raises OutOfBounds if the templates that it runs take too long or make too much."""
    global _watchdog
    thread = threading.get_ident()
    if thread in _runs:  # nested: a template is compiled within the run of the first row
        return action()
    with _lock:
        _runs[thread] = _Run(thread)
        if _watchdog is None or not _watchdog.is_alive():  # a forked process has none
            _watchdog = threading.Thread(target=_watch, name="template-watchdog", daemon=True)
            _watchdog.start()
    try:
        try:
            return action()
        finally:
            _end(thread)
    except OutOfTime:
        _end(thread)
        raise OutOfBounds(f"takes more than {SECONDS:g} seconds") from None
    except TooLarge as error:
        raise OutOfBounds(str(error)) from None


def _end(thread: int) -> None:
    """Remove the run; an exception that the watchdog has sent too late is caught here."""
    while True:
        try:
            with _lock:
                _runs.pop(thread, None)
            for _ in range(10):  # a pending exception is raised here; clearing it makes Python 3.11 loop when traced
                pass
            return
        except OutOfTime:
            continue


def _watch() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        with _lock:
            for thread, run in _runs.items():
                if _processor_seconds(thread) > run.deadline:
                    run.deadline += SECONDS  # sent again then: a destructor may have swallowed the first
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))


def _processor_seconds(thread: int) -> float:
    """Processor time of a thread; wall-clock time where threads have no clock (macOS)."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


_FLAT: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


def measure(value: Any) -> int:
    """Characters of a value with all that it contains. Raises TooLarge above `CHARACTERS`."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str | bytes):
            size += max(1, len(item))
        elif isinstance(item, int):
            refuse_above(INTEGER_BITS, item.bit_length())
            size += 4 + item.bit_length() // 3
        elif isinstance(item, _FLAT):
            if len(item) > ITEM_CHARACTERS and set(map(type, item)) <= {
                str,
                bytes,
                Markup,
            }:  # words: no loop
                size += max(len(item), sum(map(len, item)))
            else:
                size += ITEM_CHARACTERS
                left += item
        elif isinstance(item, Mapping):
            size += ITEM_CHARACTERS
            left += [*item.keys(), *item.values()]
        else:
            size += 4
        refuse_above(CHARACTERS, size)
    return size


def refuse_above(bound: int, size: int) -> None:
    if size > bound:
        raise TooLarge(f"makes more than {CHARACTERS:,} characters")


_FIELD = re.compile(r"%(?:\((?:[^()]|\([^()]*\))*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def _widths(form: Any, values: Any) -> int:
    """Sum of the widths and precisions in `form % values`."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    widths = [width for field in _FIELD.findall(text) for width in field if width]
    arguments = values if isinstance(values, tuple) else (values,)
    return sum(int(width) for width in widths if width != "*") + widths.count("*") * _largest(None, *arguments)


def _largest(_text: Any, *arguments: Any, **named: Any) -> int:
    """The largest integer argument: a width or a count."""
    return max((abs(number) for number in (*arguments, *named.values()) if isinstance(number, int)), default=0)


def _summed(_items: Any, *others: Any, **named: Any) -> int:
    """Lists are summed in quadratic time: refused."""
    return (CHARACTERS + 1) * any(isinstance(start, list | tuple) for start in (*others, *named.values()))


def _rounded(_number: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    """`round` computes 10 ** precision."""
    return (CHARACTERS + 1) * (_largest(None, precision) > 4000)


def _searched(text: Any, *others: Any) -> int:
    """A search from the right takes time of the order n * m."""
    return len(text) * sum(len(part) for part in others if isinstance(part, str | bytes)) >> 8


# filters and methods of text and numbers that are refused before they run, by what they are called with
_ESTIMATES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice"), _largest),
    **dict.fromkeys(("to_bytes", "tojson", "zfill"), _largest),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _searched),
    "format": lambda form, *values, **named: _widths(form, named or values),
    "round": _rounded,
    "sum": _summed,
}


class _Generator(CodeGenerator):
    """Measures literals and `~`: `[x, x]` in a macro that calls itself doubles with every call."""


def _measured(visit: Callable[[Any, Any, Frame], None]) -> Callable[[Any, Any, Frame], None]:
    def measured(self: Any, node: Any, frame: Frame) -> None:
        if getattr(node, "ctx", "load") != "load":  # the target of an assignment
            return visit(self, node, frame)
        self.write("environment.check(")
        visit(self, node, frame)
        self.write(")")

    return measured


for _name in ("Concat", "Dict", "List", "Tuple"):
    setattr(_Generator, f"visit_{_name}", _measured(getattr(CodeGenerator, f"visit_{_name}")))


class _Fields(SandboxedFormatter):
    """`str.format`, refused before a field that is too wide and after fields that are too much together."""

    made = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        refuse_above(CHARACTERS, sum(map(int, re.findall(r"\d+", format_spec))))
        text = str(super().format_field(value, format_spec))
        self.made += len(text)
        refuse_above(CHARACTERS, self.made)
        return text


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox whose values have bounds: `CHARACTERS` each, `TOTAL` together.

    Filters and globals that draw at random are missing: a row must always give the same prompt.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.filters["random"], self.globals["lipsum"]
        for name, function in self.filters.items():
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter whose arguments and results are bounded."""
        estimate, passed = _ESTIMATES.get(name), int(hasattr(function, "jinja_pass_arg"))  # the context, in front

        @wraps(function)
        def bounded_filter(*args: Any, **kwargs: Any) -> Any:
            if estimate is not None:
                refuse_above(CHARACTERS, estimate(*args[passed:], **kwargs))
            return self.check(function(*args, **kwargs))

        self.filters[name] = bounded_filter

    def check(self, value: T) -> T:
        """The value. Raises TooLarge if it is, or if the row has made too much."""
        size = measure(value)
        run = _runs.get(threading.get_ident())
        if run is not None and isinstance(value, str | bytes):
            run.made += size
            if run.made > TOTAL:
                raise TooLarge(f"makes more than {TOTAL:,} characters in all")
        return value

    def concat(self, texts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        parts, size = [], 0
        for text in texts:
            size += len(text)
            refuse_above(CHARACTERS, size)
            parts.append(text)
        return self.check("".join(parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            refuse_above(CHARACTERS, _widths(left, right))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            refuse_above(INTEGER_BITS, bits)
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            times, value = (left, right) if isinstance(left, int) else (right, left)
            refuse_above(CHARACTERS, measure(value) * max(times, 0))
        return self.check(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        name, owner = getattr(__obj, "__name__", None), getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int) and name in _ESTIMATES:
            refuse_above(CHARACTERS, _ESTIMATES[name](owner, *args, **kwargs))
        return __self.check(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None or isinstance(value.__self__, Markup):  # escapes its fields; the result is measured
            return wrapped
        form, is_map = value.__self__, value.__name__ == "format_map"

        def fill(*args: Any, **kwargs: Any) -> str:
            if is_map:
                (kwargs,), args = args, ()
            return _Fields(self).vformat(form, args, kwargs)

        return update_wrapper(fill, value)
