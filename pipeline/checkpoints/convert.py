"""Convert a GGUF file to a checkpoint folder: safetensors, tokenizer, chat template, generation config.

transformers reads the file. This module refuses files of which it would ignore a part, and cuts texts as llama.cpp.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from actors.engine.errors import UserError, flat
from actors.engine.model.families import family_of
from actors.engine.model.fitting import check_report
from actors.engine.model.loading import inspect
from actors.engine.model.weights import gib

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


# rules by which byte-level BPE cuts a text first, by their names in llama.cpp, whose ids a test holds for each; all but
# that of smollm are the library's. Not tekken and gpt-4o: at accents llama.cpp's rules are not the published ones.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3")  # a word of the vocabulary is one token, merged or not
PRE_TOKENIZERS = ("gpt-2", "olmo", "smollm", "dbrx", "smaug-bpe", "qwen2", "deepseek-r1-qwen", *WHOLE_WORDS)


def convert(source: Path, output: Path, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    """Write the checkpoint of a GGUF file into `output`, a new or empty folder, which appears once it is complete.

    Args:
        source: The GGUF file.
        output: The folder.
        dtype: Type of the written weights.
        report: Receives a line of text before each step, and what the user should know of the result.

    Raises:
        UserError: The file cannot be converted, or the folder holds files; before weights are read.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"OUT: {output} exists and is not empty; remove it, or choose a new folder")
    report(f"reading the header of {source}")
    header = read_header(source)
    config = _config(header)
    tokenizer = _tokenizer(header, config)
    if header.quantized:
        report(f"quantized weights ({', '.join(header.quantized)}) stay as coarse as they were")
    size = header.elements * dtype.itemsize
    report(
        f"converting {header.elements / 1e6:,.0f} million weights to {str(dtype).removeprefix('torch.')}, {gib(size)}"
    )
    model = _model(header, config, dtype)
    partial = output.resolve().with_name(f".{output.resolve().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed conversion
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod((partial / "config.json").stat().st_mode)  # safetensors lets the owner alone read weights
    inspect(partial)
    partial.rename(output.resolve())
    if not tokenizer.chat_template:
        report("the file has no chat template: prompts can be text, not messages")
    report(f"wrote {len(list(output.iterdir()))} files")


def _config(header: GgufHeader) -> PretrainedConfig:
    """transformers' config of the file, with the entries that it leaves out. UserError for a model we cannot run."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            header.path.parent, gguf_file=header.path.name, local_files_only=True
        )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"{header.path}: {flat(error)}") from None
    if config.model_type == "gpt2":
        config.n_positions = header.of_model("context_length")
    elif hasattr(config, "head_dim") or header.of_model("attention.key_length") is not None:
        config.head_dim = head_dim(header)
    if hasattr(config, "sliding_window"):
        config.sliding_window = header.of_model("attention.sliding_window")
    config.update(_token_ids(header))  # the library's defaults may lie outside the vocabulary
    family_of(config)
    return config


def _tokenizer(header: GgufHeader, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The file's tokenizer, which cuts texts as llama.cpp does. UserError for a rule that is not known."""
    rule, is_bpe = header.values.get("tokenizer.ggml.pre"), header.values["tokenizer.ggml.model"] == "gpt2"
    if is_bpe and rule not in PRE_TOKENIZERS:
        raise UserError(
            f"{header.path}: tokenizer.ggml.pre = {rule!r}: texts might be cut into other tokens than llama.cpp's; "
            f"held to its tokens are {', '.join(PRE_TOKENIZERS)}; take the safetensors checkpoint"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            header.path.parent, gguf_file=header.path.name, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"{header.path}: its tokenizer cannot be read: {flat(error)}") from None
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if is_bpe:
        backend = cast(Any, tokenizer).backend_tokenizer
        backend.model.ignore_merges = rule in WHOLE_WORDS
        if rule == "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def _model(header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with dequantized weights. UserError if a weight is missing, or one of the file was left out."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        header.path.parent,
        gguf_file=header.path.name,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
        local_files_only=True,
        trust_remote_code=False,
    )
    model, report = loaded
    check_report(model, report, {}, str(header.path))
    used = sum(parameter.numel() for parameter in model.parameters())  # tied ones once
    if used != header.elements:
        raise UserError(
            f"{header.path}: {header.elements:,} weights, and transformers' {config.model_type} has {used:,}: some "
            "would be left out; take the safetensors checkpoint"
        )
    # the weights are plain now; with these the library would refuse to save them, or call them quantized
    model.is_quantized, model.hf_quantizer = False, None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if getattr(holder, name, None) is not None:
            delattr(holder, name)
    model.generation_config = GenerationConfig(**_token_ids(header))  # GGUF has no sampling values
    assert isinstance(model, PreTrainedModel)
    return model


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Ids of begin, end and padding. An answer ends at the end of a sequence or of a turn."""
    ids = {name: header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [*dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None)]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"] if ids["padding"] is not None else (ends or [None])[0],
    }
