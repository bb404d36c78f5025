"""transformers' models without the libraries that a CPU never runs them with, in half the processor time.

Beside its models transformers imports torch's compiler, what several processes share a model by, attention that is
compiled, and other packages that happen to be installed. Without these it imports as on a machine that lacks them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from actors.engine.checkpoint.library_index import keep_index
from actors.engine.no_collections import without_collections

PACKAGES = "accelerate", "peft", "PIL", "scipy", "sklearn"  # transformers imports them where they are installed
QUESTIONS = "accelerate", "peft", "scipy", "sklearn", "torch_distributed", "torch_flex_attn", "vision"
MASKS = "torch._dynamo._trace_wrapped_higher_order_op"  # of which transformers' masks import one class


@without_collections()
def import_models() -> None:
    """Import transformers' models so; for a process of one's own that answers rows or scores texts.

    Where torch sees a GPU, or the models have been imported, nothing is done. Else transformers lacks in this process:
    accelerate, which loads models to GPUs; torch.distributed and flex attention; torch.compiler.disable around its own
    functions for GPUs. torch is as ever, as is whoever imports these libraries himself.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    import torch

    if torch.cuda.is_available():
        return
    keep_index()
    with ExitStack() as stack:
        for name in PACKAGES:
            stack.enter_context(_not_there(name))
        stack.enter_context(_attribute(torch.distributed, "is_available", lambda: False))
        from transformers.utils import import_utils

        if hasattr(import_utils, "get_device_type"):
            stack.enter_context(_attribute(import_utils, "get_device_type", lambda: "tpu"))  # without flex attention
        for name in QUESTIONS:  # it remembers its answers
            ask: Any = getattr(import_utils, f"is_{name}_available", None)
            if hasattr(ask, "cache_clear"):
                ask.cache_clear()  # another function of this process may have asked while the package was there
                ask()
        if "torch._dynamo" not in sys.modules:
            stack.enter_context(_without_compiler())
        import transformers.generation.utils
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401


@contextmanager
def _not_there(name: str) -> Iterator[None]:
    """A package that cannot be found, unless it has been imported."""
    modules: dict[str, Any] = sys.modules
    if name in modules:
        yield
        return
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """The compiler is imported only if more than decorators and a class of it are asked for."""
    import torch

    masks: Any = ModuleType(MASKS)
    masks.TransformGetItemToIndex = _get_item_to_index
    stand_ins = {"torch._dynamo": _Compiler("torch._dynamo"), MASKS: masks}
    sys.modules |= stand_ins
    try:
        with _attribute(torch.compiler, "disable", _unchanged):
            yield
    finally:
        _remove(stand_ins)


class _Compiler(ModuleType):
    """In place of torch._dynamo until something is asked for that it does not have."""

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        """A decorator, which means something to compiled callers alone."""
        return function

    allow_in_graph = assume_constant_result

    def __getattr__(self, name: str) -> Any:
        _remove({"torch._dynamo": self, MASKS: sys.modules.get(MASKS)})
        return getattr(importlib.import_module("torch._dynamo"), name)


def _remove(modules: Mapping[str, ModuleType | None]) -> None:
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            sys.modules.pop(name, None)


def _get_item_to_index() -> Any:
    """In place of the class, as masks call it."""
    masks = importlib.import_module(MASKS)
    return masks.TransformGetItemToIndex()


def _unchanged(function: Callable[..., Any] | None = None, recursive: bool = True, **others: Any) -> Any:
    """In place of torch.compiler.disable."""
    return function if function is not None else lambda decorated: decorated
