"""Which product multiplies a model's weights in bfloat16: this package's kernel or the library's, by measurement.

Both exist where a processor has AVX512-BF16, and the library's may use instructions that the kernel does not (AMX).
Their sums are rounded differently, so that an answer may depend on the choice: it is measured once and recorded.
Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch

from actors.engine.checkpoint.file_digests import cache_root
from actors.engine.cpu import kernels, library
from actors.engine.cpu.packing import PackedProduct, PanelProduct, can_pack
from actors.engine.errors import UserError
from actors.engine.types import ProductsName

VERSION = 1  # raise by hand when a change of the code calls for another measurement
ROWS = 32, 256  # of a step, and of prompts in one pass; a token of each counts once
MOST = 2**27  # numbers multiplied in a call that is timed: of a larger product a part of the outputs
ROUNDS = 5  # of calls of both in turn; the fastest counts
MARGIN = 0.9  # of the kernels' time, which the library's must stay below: only the kernels run whole layers
CALLS = 8  # from Python between a layer's products, which take no time where one native call computes the layer
ISA_VARIABLES = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"  # what the library may use


@dataclass(frozen=True)
class Products:
    """All products of a model.

    Args:
        layer: shapes [O, I] of a layer's weights.
        layers: how many layers have them.
        head: shape of the vocabulary head's weight.
        stacks: whether the kernels compute a layer in one native call.
    """

    layer: tuple[tuple[int, int], ...]
    layers: int
    head: tuple[int, int]
    stacks: bool


class Records(Protocol):
    """Where choices are kept, by key."""

    def find(self, key: str) -> bytes | None:
        """The record of a key; None if there is none."""
        ...

    def settle(self, key: str, value: bytes) -> bytes:
        """Record a value unless there is one; returns the record."""
        ...


class CacheRecords:
    """Records in the cache of this machine; one that cannot be written keeps none."""

    def _path(self, key: str) -> Path:
        return cache_root(None) / "products" / f"{key}.json"

    def find(self, key: str) -> bytes | None:
        """See `Records`."""
        try:
            return self._path(key).read_bytes()
        except OSError:
            return None

    def settle(self, key: str, value: bytes) -> bytes:
        """See `Records`. A damaged record is replaced."""
        path = self._path(key)
        temporary = path.with_suffix(f".{uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(value)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if is_choice(found := path.read_bytes()):
                    return found
                temporary.replace(path)
        except OSError:
            pass
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return value


class Choice:
    """Whether a model's weights are multiplied by this package's kernel.

    Args:
        setting: kernels: where they exist; library: never; measured: where they are not slower.
        records: of measured choices, besides the cache's; the first one decides.
    """

    def __init__(self, setting: ProductsName = "kernels", records: Sequence[Records] = ()) -> None:
        self.setting = setting
        self.records = (*records, CacheRecords())

    def __call__(self, products: Products) -> bool:
        """For the products of a model in bfloat16; without the kernel's instructions it does not matter."""
        if self.setting != "measured" or not _has_both(products):
            return self.setting != "library"
        key = key_of(products)
        product = chosen(settled(key, self.records, lambda: encoded(measured(products))))
        if product is None:
            raise UserError(f"products-{key}.json of the job is damaged: delete it")
        return product == "kernels"


def _has_both(products: Products) -> bool:
    cpu = torch.device("cpu")
    is_even = all(inputs % 2 == 0 for _, inputs in (*products.layer, products.head))
    return is_even and can_pack(torch.bfloat16, cpu) and library.multiplies(torch.bfloat16, cpu)


def settled(key: str, records: Sequence[Records], measure: Callable[[], bytes]) -> bytes:
    """The choice of the first record that has one, else a new one; the records before it then have it too.

    Where another process is first, the choice is that process's.
    """
    asked: list[Records] = []
    for record in records:
        known = record.find(key)
        if known is not None and is_choice(known):
            break
        asked.append(record)
    else:
        known = measure()
    for record in reversed(asked):
        known = record.settle(key, known)
    return known


def chosen(record: bytes) -> str | None:
    """kernels or library; None for a damaged record."""
    try:
        product = json.loads(record)["product"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return product if product in ("kernels", "library") else None


def is_choice(record: bytes) -> bool:
    """Whether a record is whole."""
    return chosen(record) is not None


def encoded(seconds: Mapping[str, float]) -> bytes:
    """The record of a measurement in seconds for each product."""
    product = "library" if seconds["library"] < MARGIN * seconds["kernels"] else "kernels"
    return json.dumps({"product": product, "seconds_per_token": dict(seconds)}).encode()


def key_of(products: Products) -> str:
    """Of all that may change a measurement: processor, kernels and compiler, library, threads, shapes."""
    loaded = library.library()
    assert loaded is not None
    limits = [os.environ.get(name, "") for name in ISA_VARIABLES]
    shapes = [products.layer, products.layers, products.head, products.stacks]
    values = [VERSION, Path(loaded._name).stem, torch.__version__, torch.get_num_threads(), limits, shapes]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:20]


@torch.inference_mode()
def measured(products: Products) -> dict[str, float]:
    """Seconds, by each product, of one token in a step of 32 rows and one in a pass over 256 prompt tokens."""
    by_kernels, by_library = _of_shape(products.head, native=False)
    for shape, count in Counter(products.layer).items():
        kernel, other = _of_shape(shape, native=products.stacks)
        by_kernels += products.layers * count * kernel
        by_library += products.layers * count * other
    if products.stacks:
        hidden = torch.ones(1, 64, dtype=torch.bfloat16)
        [call] = _fastest([lambda: kernels.normalize(hidden, hidden[0], None, 1e-6)])
        by_library += products.layers * CALLS * call / ROWS[0]
    return {"kernels": by_kernels, "library": by_library}


def _of_shape(shape: tuple[int, int], *, native: bool) -> tuple[float, float]:
    """Seconds of a token by the kernel and by the library, of a step and of prompts together, for a weight [O, I].

    native: without the kernel's call from Python.
    """
    (outputs, inputs), kernel_seconds, library_seconds = shape, 0.0, 0.0
    for rows in ROWS:
        part = min(outputs, max(kernels.PANEL, MOST // (rows * inputs)))
        weight = torch.full((part, inputs), 0.5, dtype=torch.bfloat16)
        hidden = torch.full((rows, inputs), 0.5, dtype=torch.bfloat16)
        by_kernel, by_library = PanelProduct(weight, None), PackedProduct(weight, None)
        run = _native(by_kernel, hidden) if native else functools.partial(by_kernel, hidden)
        kernel, other = _fastest([run, functools.partial(by_library, hidden)])
        kernel_seconds += kernel * outputs / part / rows
        library_seconds += other * outputs / part / rows
    return kernel_seconds, library_seconds


def _native(product: PanelProduct, hidden: torch.Tensor) -> Callable[[], Any]:
    """The product's native call alone, as a native layer makes it."""
    output = torch.empty(len(hidden), product.outputs, dtype=hidden.dtype)
    run, sizes = library.kernel("multiply", hidden.dtype), (len(hidden), product.inputs, product.outputs, False)

    def call() -> None:
        run(hidden.data_ptr(), product.packed.data_ptr(), None, None, output.data_ptr(), *sizes)

    return call


def _fastest(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of the fastest of `ROUNDS` calls of each, in turn, after one that does not count.

    Of the processor where one thread computes, so that other work on the machine does not count.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, taken in zip(calls, times, strict=True):
            began = clock()
            call()
            taken.append(clock() - began)
    return [min(taken[1:]) for taken in times]
