"""Bounds on what one row's template may do: seconds of work, and characters that it makes.

Templates come with job files and checkpoints, values with data: none of them may stop a job, or take its memory.
Each operation that can make something large out of something small is looked at before it is done; what is left,
loops and recursion, is ended by a watchdog.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.prepare.template_fields import filled
from pipeline.prepare.template_held import Held
from pipeline.prepare.template_sizes import (
    CHARACTERS,
    FILTERS,
    INTEGER_BITS,
    METHODS,
    TooLarge,
    measure,
    printed,
    refuse_above,
    repeated,
    too_large,
)

SECONDS = 5.0  # processor seconds of one row's template: another process's load must not fail a row
HELD = 2**29  # bytes of all values that one row's template holds at a time
_POLL_SECONDS = 0.1

T = TypeVar("T")


class OutOfBounds(ValueError):
    """A row's template takes too long or makes too much; in one line."""


class OutOfTime(BaseException):
    """Raised in the midst of a template by the watchdog; nothing on the way up may take it for its own."""


@dataclass(eq=False)
class _Run:
    """A template at work."""

    held: Held = field(default_factory=Held)


_lock = threading.Lock()
_running: dict[int, _Run] = {}  # thread -> its run; changed, and looked through, under the lock
_watchdog: threading.Thread | None = None


def bounded(action: Callable[[], T]) -> T:
    """The action's value. OutOfBounds if its templates take too long or make too much."""
    global _watchdog
    thread = threading.get_ident()
    if thread in _running:  # compiled within the run of the first row
        return action()
    with _lock:
        _running[thread] = _Run()
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
    """Nothing is sent to the thread any more; what was sent too late comes here."""
    while True:
        try:
            with _lock:
                _running.pop(thread, None)
            for _ in range(10):  # at one of these steps. Taking it back leaves Python 3.11 in an endless loop if traced
                pass
            return
        except OutOfTime:
            continue


def _send(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _worked(thread: int) -> float:
    """Processor seconds of a thread; those of the clock where a thread has none (macOS)."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _watch() -> None:
    """Send `OutOfTime` into threads whose template has worked for too long."""
    seen: dict[int, tuple[_Run, float]] = {}  # thread -> its run, and the thread's seconds when it was first seen
    while True:
        time.sleep(_POLL_SECONDS)
        with _lock:
            for thread, run in _running.items():
                worked = _worked(thread)
                before, began = seen.get(thread, (None, 0.0))
                if before is not run:
                    seen[thread] = run, worked
                elif worked - began > SECONDS:
                    seen[thread] = run, worked  # again after as long: a destructor may have swallowed it
                    _send(thread, OutOfTime)


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

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):  # the library writes Python's own, without the environment
            self._kept(super().visit_Getitem, node, frame, [node.node])
        else:
            super().visit_Getitem(node, frame)

    def _kept(self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame, items: list[Any]) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
        else:
            self.write("environment.keep(")
            visit(node, frame)
            self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose values have bounds: `CHARACTERS` each, `HELD` at a time."""

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
        _charge(value)
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """What the library joins with: a template's output, a macro's, a block's."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > CHARACTERS:
                raise too_large()
            found.append(piece)
        return self.keep("".join(found))

    def text(self, values: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        return self.concat(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            refuse_above(CHARACTERS, repeated(left, right))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > INTEGER_BITS:
                raise too_large()
        elif operator == "%" and isinstance(left, str | bytes):
            refuse_above(CHARACTERS, printed(left, right))
        return self.keep(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        name, owner = getattr(__obj, "__name__", None), getattr(__obj, "__self__", None)
        if name in METHODS and isinstance(owner, str | bytes | int):
            if name == "join":
                args = _with_length(args, 0)
            refuse_above(CHARACTERS, METHODS[name](owner, *args, **kwargs))
        return __self.keep(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None if super().wrap_str_format(value) is None else filled(self, value)


def _charge(value: Any) -> None:
    characters, size = measure(value)
    refuse_above(CHARACTERS, characters)
    run = _running.get(threading.get_ident())
    if run is not None and run.held.add(value, size) > HELD:
        raise TooLarge(f"makes more than {HELD:,} bytes at a time")


def _with_length(args: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """The arguments, with a list in place of an iterator."""
    if len(args) <= place or hasattr(args[place], "__len__"):
        return args
    return (*args[:place], list(args[place]), *args[place + 1 :])


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    estimate = FILTERS.get(name)
    context = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that the library puts in front

    @wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        if estimate is not None:
            if name == "join":
                args = _with_length(args, context)
            refuse_above(CHARACTERS, estimate(*args[context:], **kwargs))
        found = function(*args, **kwargs)
        _charge(found)
        return found

    return within
