"""Finds a checkpoint's safetensors files, reads their headers, and computes the memory that a model needs."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from actors.engine.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # maximum bytes of a safetensors header, as in the safetensors library
ALLOWANCE = 2**29  # bytes of memory for the process, its libraries, and the activations and logits of a batch
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# hold this lock while transformers builds a model: it changes a class's method and torch's default dtype meanwhile
building_models = threading.Lock()
_HEADS = ("lm_head.weight", "embed_out.weight")


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, according to the file's header."""

    file: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Need:
    """Memory that one actor needs, in bytes."""

    parameters: int  # number of the model's parameters
    weights: int  # bytes of all parameters in the job's dtype
    cache: int  # bytes of one batch's KV cache
    working: int = ALLOWANCE  # bytes of everything else: process, libraries, activations and logits

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the files with weights in a checkpoint: a single file, or all shards. names: all files in `folder`.

    Raises UserError if there is no safetensors file, a wrong index, a missing shard, or an index beside a single file.
    """
    if INDEX not in names:
        if WEIGHTS in names:
            return [WEIGHTS]
        other = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        hint = f"; {other[0]} is a pickle, which is not loaded: convert it" if other else ""
        if gguf := sorted(name for name in names if name.endswith(".gguf")):
            hint = f"; {gguf[0]} is GGUF, which is not loaded: give the publisher's safetensors"
        raise UserError(f"{folder}: no safetensors weights ({WEIGHTS} or {INDEX}){hint}")
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder / INDEX}: not an index of weights: no weight_map from tensors to files") from None
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX}: names {name!r}, which is no safetensors file in its folder: fetch the "
                "checkpoint again"
            )
    if WEIGHTS in names and shards != [WEIGHTS]:
        raise UserError(
            f"{folder}: {WEIGHTS} lies beside {INDEX} and its shards, and only one can be the model: remove one"
        )
    if not shards:
        raise UserError(f"{folder / INDEX}: names no file: fetch the checkpoint again")
    if missing := [name for name in shards if name not in names]:
        raise UserError(
            f"{folder}: {len(missing)} of {len(shards)} shards in {INDEX} are missing, e.g. {missing[0]}: fetch the "
            "checkpoint again"
        )
    return shards


def file_tensors(read: Callable[[int, int], bytes], size: int, name: str) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Args:
        read: function (number of bytes, offset) -> bytes, like os.pread.
        size: bytes of the file.
        name: name of the file, for error messages.

    Raises UserError if the header is damaged or does not fit the size, for example after an interrupted download.
    """
    head = read(8, 0) if size >= 8 else b""
    length = int.from_bytes(head, "little")
    if len(head) != 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise UserError(f"{name}: not a whole safetensors file: no header in {size} bytes; fetch it again")
    try:
        header = json.loads(read(length, 8))
        tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        found = {key: StoredTensor(name, tuple(map(int, entry["shape"]))) for key, entry in tensors.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{name}: not a safetensors file: its header cannot be read") from None
    if end != size:
        raise UserError(f"{name}: {size} bytes, but its header says {end}: cut short or damaged; fetch it again")
    return found


def joined(files: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Merge the tensors of all files of a checkpoint. Raises UserError if two files hold a tensor of the same name."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name in sorted(file.keys() & tensors.keys()):
            first, second = tensors[name], file[name]
            raise UserError(
                f"{first.file}: {name} {list(first.shape)} is also in {second.file}, {list(second.shape)}: only one "
                "can be the model's; fetch the checkpoint again, or remove one of the two files"
            )
        tensors |= file
    return tensors


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors in a checkpoint folder. Raises UserError as `weight_files`, `file_tensors` and `joined` do."""

    def header(path: Path) -> dict[str, StoredTensor]:
        with open(path, "rb") as file:
            return file_tensors(partial(os.pread, file.fileno()), path.stat().st_size, str(path))

    return joined(header(folder / name) for name in weight_files(folder, names_in(folder)))


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of the files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def need(tensors: Mapping[str, StoredTensor], *, tied: bool, dtype: str, cache_bytes: int) -> Need:
    """Return the memory that a model needs in `dtype`. tied: whether head and embedding share a tensor in memory."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    count = sum(sizes.values())
    shapes = [tensor.shape for tensor in tensors.values()]
    if tied:  # the embedding has the head's shape; a checkpoint may also store only one of the two
        count -= sum(sizes[name] for name in _HEADS if name in sizes and shapes.count(tensors[name].shape) > 1)
    return Need(count, count * ITEM_BYTES[dtype], cache_bytes)


def check_free(need: Need, free: int, total: int) -> None:
    """Raise UserError if a GPU with `free` of `total` bytes free is too small for the model and its KV cache."""
    if need.total > free:
        raise UserError(
            f"the model needs {gib(need.total)} of GPU memory (weights {gib(need.weights)}, cache {gib(need.cache)}, "
            f"{gib(need.working)} working memory), but {gib(free)} of {gib(total)} are free: lower actors.cache_bytes, "
            "let fewer actors share a GPU, or free some of its memory"
        )


def gib(count: int) -> str:
    """Format a number of bytes as text in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
