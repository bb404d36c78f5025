"""The header of a GGUF file: which model it holds, and whether transformers reads all of it. No weights are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError, flat

if TYPE_CHECKING:
    from gguf import GGUFReader

# as GGUF names them, families of the engine that transformers reads; Mistral's files say llama
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2")
EMBEDDING = "token_embd.weight"
PLAIN = ("F32", "F16", "BF16")  # tensor types that are not quantized
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
ROPE_FACTORS = re.compile(r"(^|\.)rope_(freqs|factors)")  # tensors by which a model scales its rope
# query_pre_attn_scalar is not in the file, and differs from the library's default
OTHER_SCALING = {("gemma2", 46): "Gemma 2 27B", ("gemma3", 62): "Gemma 3 27B"}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of its model.

    Args:
        path: the file.
        architecture: as GGUF names it.
        values: its other entries that are single values, by key, such as ``llama.block_count``.
        types: names of its tensors' types, such as Q4_1.
        elements: numbers in all tensors.
    """

    path: Path
    architecture: str
    values: dict[str, Any]
    types: frozenset[str]
    elements: int

    def of_model(self, key: str) -> Any:
        """The value of an entry of the architecture, such as ``attention.key_length``; None without it."""
        return self.values.get(f"{self.architecture}.{key}")

    @property
    def quantized(self) -> list[str]:
        """Sorted names of the quantized types among the tensors'."""
        return sorted(self.types - set(PLAIN))


def read_header(path: Path) -> GgufHeader:
    """Read and check a header.

    Raises UserError: no such file, not GGUF or cut short, one part of a split file, another architecture, no
    tokenizer, or a model whose answers would differ because transformers ignores a part of the file.
    """
    from gguf import GGUFReader

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path}: not a GGUF file")
    try:
        reader = GGUFReader(path)
        header = _header(path, reader)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: damaged or cut short ({flat(error)}); fetch it again") from None
    _check(header, reader)
    return header


def _header(path: Path, reader: GGUFReader) -> GgufHeader:
    values = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    values |= {key: True for key in reader.fields if key not in values}  # of lists only their presence matters
    return GgufHeader(
        path,
        str(values.get("general.architecture", "")),
        values,
        frozenset(tensor.tensor_type.name for tensor in reader.tensors),
        sum(int(tensor.n_elements) for tensor in reader.tensors),
    )


def _check(header: GgufHeader, reader: GGUFReader) -> None:
    path, rows = header.path, {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors}
    part = PART.search(path.name)
    parts = int(header.values.get("split.count") or (part[1] if part else 1))
    if parts > 1:
        raise UserError(f"{path}: one of {parts} parts; join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf")
    if header.architecture not in ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {header.architecture!r} cannot be converted; can be: {', '.join(ARCHITECTURES)}"
        )
    if not rows:
        raise UserError(f"{path}: no weights, only a vocabulary")
    if not {"tokenizer.ggml.model", "tokenizer.ggml.tokens"} <= header.values.keys():
        raise UserError(f"{path}: no tokenizer in it; convert a file that has one")
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    if rows.get(EMBEDDING, tokens) != tokens:
        raise UserError(
            f"{path}: {EMBEDDING} has {rows[EMBEDDING]} rows, and tokenizer.ggml.tokens {tokens} entries: parts of two "
            "models; fetch it again"
        )
    if reason := _ignored(header, list(rows)):
        raise UserError(
            f"{path}: {reason}, which transformers does not read from GGUF: answers would differ; take the "
            "safetensors checkpoint"
        )


def _ignored(header: GgufHeader, names: list[str]) -> str | None:
    """The part of the model that transformers ignores; None if it reads everything that `complete` does not add."""
    scaling = header.of_model("rope.scaling.type")
    if scaling not in (None, "none") or any(ROPE_FACTORS.search(name) for name in names):
        return f"its rope is scaled ({scaling or 'by factors'})"
    rotated, head = header.of_model("rope.dimension_count"), head_dim(header)
    if rotated is not None and head is not None and rotated != head:
        return f"its rope turns {rotated} of {head} numbers of a head"
    if header.architecture == "llama" and header.of_model("attention.sliding_window"):
        return "it has a sliding window"
    if header.of_model("expert_count"):
        return "it is a mixture of experts"
    if (name := OTHER_SCALING.get((header.architecture, header.of_model("block_count")))) is not None:
        return f"{name} scales its queries by a number of its own"
    return None


def head_dim(header: GgufHeader) -> int | None:
    """Numbers of an attention head; None if the header does not say."""
    if (length := header.of_model("attention.key_length")) is not None:
        return int(length)
    width, heads = header.of_model("embedding_length"), header.of_model("attention.head_count")
    return int(width) // int(heads) if width and heads else None
