"""Which safetensors files hold a checkpoint's weights, and the memory they will take, from their headers alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from actors.engine.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # bytes; the library refuses longer ones too
ALLOWANCE = 2**29  # bytes beside weights and cache: the process and its libraries, a batch's activations and logits
SPARED = 32  # one in so many bytes of a GPU's room for cache is left free
CACHE_STEP = 2**26  # bytes; what is planned from free memory is a multiple
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Need:
    """Memory that one actor needs, in bytes; weights: all parameters in the job's dtype; cache: of one batch; beside:
    of all else."""

    parameters: int
    weights: int
    cache: int
    beside: int = ALLOWANCE

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.beside


def weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """The files among `names` that hold the weights: one, or the shards of the index, which lies in `folder`.

    Raises ValueError of one line: no safetensors, an index that cannot be read, a shard that is not there.
    """
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX not in names:
        other = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        found = f"; {other[0]} is a pickle, which is not loaded: convert it" if other else ""
        raise UserError(f"{folder}: no safetensors weights ({WEIGHTS} or {INDEX}){found}")
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / INDEX}: not an index of weights: needs a weight_map of tensors to files") from None
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX}: names {name!r}, which is no safetensors file beside it")
    missing = [name for name in shards if name not in names]
    if missing or not shards:
        gone = missing[0] if missing else "no file at all"
        raise UserError(f"{folder}: {INDEX} names {gone}, {len(missing)} of {len(shards)} shards are missing")
    return shards


def tensor_sizes(read: Callable[[int, int], bytes], size: int, name: str) -> dict[str, int]:
    """Numbers of every tensor of a safetensors file of `size` bytes.

    read: (bytes, first byte) -> bytes, as os.pread. Raises ValueError of one line if header and length disagree, as
    they do after a download that was cut short.
    """
    head = read(8, 0) if size >= 8 else b""
    length = int.from_bytes(head, "little")
    if len(head) != 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise UserError(f"{name}: not a whole safetensors file: {size} bytes, no header in them; fetch it again")
    try:
        header = json.loads(read(length, 8))
        tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        sizes = {key: math.prod(int(one) for one in entry["shape"]) for key, entry in tensors.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{name}: not a safetensors file: its header cannot be read") from None
    if end != size:
        raise UserError(f"{name}: {size} bytes, but its header says {end}: cut short or damaged, fetch it again")
    return sizes


def folder_sizes(folder: Path) -> dict[str, int]:
    """Numbers of every tensor of a checkpoint folder. ValueError of one line if a file is missing or damaged."""
    sizes: dict[str, int] = {}
    for name in weight_files(folder, names_in(folder)):
        with open(folder / name, "rb") as file:
            sizes |= tensor_sizes(partial(os.pread, file.fileno()), (folder / name).stat().st_size, str(folder / name))
    return sizes


def names_in(folder: Path) -> list[str]:
    """Names of the files of a folder, sorted."""
    return sorted(one.name for one in folder.iterdir() if one.is_file())


def need(sizes: Mapping[str, int], *, tied: bool, dtype: str, cache_bytes: int) -> Need:
    """What a model of these tensors takes in `dtype`; tied: head and embedding are one, even if stored twice."""
    count = sum(sizes.values())
    if tied and len(sizes) > 1:
        count -= sum(sizes.get(name, 0) for name in _HEADS)
    return Need(count, count * ITEM_BYTES[dtype], cache_bytes)


def check_free(need: Need, free: int, total: int) -> None:
    """ValueError of one line if a GPU with `free` of `total` bytes cannot hold what is needed."""
    if need.total > free:
        raise UserError(
            f"the model needs {gib(need.total)} of GPU memory (weights {gib(need.weights)}, cache {gib(need.cache)}, "
            f"{gib(need.beside)} beside them), but {gib(free)} of {gib(total)} are free: lower actors.cache_bytes, let "
            "fewer actors share a GPU, or free it"
        )


def cache_that_fits(need: Need, free: int) -> int:
    """Bytes of cache that a GPU with `free` bytes has room for beside what is needed without one, at least 1; some are
    left, for what comes in pieces of its own size."""
    room = free - need.weights - need.beside
    return max(1, (room - room // SPARED) // CACHE_STEP * CACHE_STEP)


def gib(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
