"""Converts a GGUF file to a checkpoint folder: safetensors, tokenizer, chat template, generation config.

transformers reads the GGUF file. This module refuses a file if transformers would ignore a part of it, and makes the
tokenizer split texts as llama.cpp does.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import normalizers, pre_tokenizers
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

# model families that both the engine and transformers can read, by their names in GGUF; Mistral's name is llama
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2")
PLAIN = {"F32", "F16", "BF16"}  # tensor types without quantization
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
ROPE_FACTORS = re.compile(r"(^|\.)rope_(freqs|factors)")  # names of tensors that scale RoPE
# (architecture, layers) -> model whose query_pre_attn_scalar is not the default. GGUF does not store this value
OTHER_SCALING = {("gemma2", 46): "Gemma 2 27B", ("gemma3", 62): "Gemma 3 27B"}
# pre-tokenization rules that never split a word of the vocabulary; they put BOS before a text unless the file says no
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3")
# pre-tokenization rules that `_tokenizer` supports, by llama.cpp's names; a test compares token ids. Tekken and gpt-4o
# are missing, because llama.cpp splits accents differently than the models' own tokenizers
PRE_TOKENIZERS = ("gpt-2", "olmo", "smollm", "dbrx", "smaug-bpe", "qwen2", "deepseek-r1-qwen", *WHOLE_WORDS)
UNREADABLE = (ValueError, KeyError, OSError, TypeError, AttributeError)  # errors of transformers for a bad file


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    path: Path
    values: dict[str, Any]  # key, such as ``llama.block_count`` -> value; True in place of a list of values
    tokens: int  # size of the vocabulary
    types: frozenset[str]  # names of the tensors' types, such as Q4_1
    rows: dict[str, int]  # tensor name -> number of rows
    elements: int  # number of elements in all tensors together

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def of_model(self, key: str) -> Any:
        """Return the value of the key ``{architecture}.{key}``; None if there is none."""
        return self.values.get(f"{self.architecture}.{key}")

    @property
    def head_dim(self) -> int | None:
        """Number of dimensions of an attention head; None if the header does not give it."""
        if (length := self.of_model("attention.key_length")) is not None:
            return int(length)
        width, heads = self.of_model("embedding_length"), self.of_model("attention.head_count")
        return int(width) // int(heads) if width and heads else None

    def refusal(self) -> str | None:
        """Return why the file cannot be converted and what to do; None if it can be converted."""
        part = PART.search(self.path.name)
        parts = int(self.values.get("split.count") or (part[1] if part else 1))
        scaling, rotated = self.of_model("rope.scaling.type"), self.of_model("rope.dimension_count")
        scaled = scaling not in (None, "none") or any(ROPE_FACTORS.search(name) for name in self.rows)
        other = OTHER_SCALING.get((self.architecture, self.of_model("block_count")))
        embedded = self.rows.get("token_embd.weight", self.tokens)
        ignored = "which transformers does not read from GGUF, so answers would differ; use the safetensors checkpoint"
        reasons: list[tuple[Any, str]] = [
            (parts > 1, f"it is one of {parts} parts; join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"),
            (
                self.architecture not in ARCHITECTURES,
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}",
            ),
            (not self.rows, "it holds a vocabulary but no weights; give a file with weights"),
            (
                not self.tokens or "tokenizer.ggml.model" not in self.values,
                "the file has no tokenizer; give a file that has one",
            ),
            (
                embedded != self.tokens,
                f"token_embd.weight has {embedded} rows, but tokenizer.ggml.tokens has {self.tokens} entries: the file "
                "mixes two models; fetch it again",
            ),
            (scaled, f"its rope is scaled ({scaling or 'by factors'}), {ignored}"),
            (
                rotated is not None and self.head_dim is not None and rotated != self.head_dim,
                f"its rope rotates {rotated} of {self.head_dim} dimensions of a head, {ignored}",
            ),
            (
                self.architecture == "llama" and self.of_model("attention.sliding_window"),
                f"it has a sliding window, {ignored}",
            ),
            (self.of_model("expert_count"), f"it is a mixture of experts, {ignored}"),
            (other, f"{other} has its own scaling factor for queries, {ignored}"),
        ]
        return next((reason for holds, reason in reasons if holds), None)


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises UserError if the file is not GGUF, is damaged or cannot be converted."""
    from gguf import GGUFReader

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path}: not a GGUF file")
    try:
        reader = GGUFReader(path)
        header = GgufHeader(
            path,
            {key: field.contents() if len(field.data) == 1 else True for key, field in reader.fields.items()},
            len(field.data) if (field := reader.fields.get("tokenizer.ggml.tokens")) else 0,
            frozenset(tensor.tensor_type.name for tensor in reader.tensors),
            {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors},
            sum(int(tensor.n_elements) for tensor in reader.tensors),
        )
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: damaged or cut short ({flat(error)}); fetch it again") from None
    if reason := header.refusal():
        raise UserError(f"{path}: {reason}")
    return header


def convert(source: Path, output: Path, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    """Convert a GGUF file to a checkpoint in the folder `output`, in which all files appear at once.

    dtype: type of the written weights. report: called with each progress line. Raises UserError if `output` holds
    files, or if the file cannot be converted (in most cases before weights are read).
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise UserError(f"OUT: {output} exists and is not empty; remove it, or choose a new folder")
    report(f"reading the header of {source}")
    header = read_header(source)
    config = _config(header)
    tokenizer = _tokenizer(header, config)
    if quantized := sorted(header.types - PLAIN):
        report(f"quantized weights ({', '.join(quantized)}) keep the precision of their quantization")
    size, name = gib(header.elements * dtype.itemsize), str(dtype).removeprefix("torch.")
    report(f"converting {header.elements / 1e6:,.0f} million weights to {name}, {size}")
    model = _model(header, config, dtype)
    partial = output.resolve().with_name(f".{output.resolve().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # remove the files of an earlier, killed conversion
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod((partial / "config.json").stat().st_mode)  # safetensors makes weights readable by the owner only
    inspect(partial)
    partial.rename(output.resolve())
    if not tokenizer.chat_template:
        report("the file has no chat template, so prompts can be text but not messages")
    report(f"wrote {len(list(output.iterdir()))} files")


def _read(header: GgufHeader, kind: Any, **options: Any) -> Any:
    """Use `kind`, one of transformers' auto classes, to read the config, tokenizer or model from the file."""
    return kind.from_pretrained(header.path.parent, gguf_file=header.path.name, local_files_only=True, **options)


def _config(header: GgufHeader) -> PretrainedConfig:
    """Return transformers' config, corrected by the header. Raises UserError if the engine cannot run the model."""
    try:
        config: PretrainedConfig = _read(header, AutoConfig)
    except UNREADABLE as error:
        raise UserError(f"{header.path}: {flat(error)}") from None
    if config.model_type == "gpt2":
        config.n_positions = header.of_model("context_length")
    elif hasattr(config, "head_dim") or header.of_model("attention.key_length") is not None:
        config.head_dim = header.head_dim
    if hasattr(config, "sliding_window"):
        config.sliding_window = header.of_model("attention.sliding_window")
    config.update(_token_ids(header))  # replaces transformers' default ids, which may lie outside the vocabulary
    family_of(config)
    return config


def _tokenizer(header: GgufHeader, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Return a tokenizer that splits texts as llama.cpp does. Raises UserError if the file's rule is unknown."""
    rule, is_bpe = header.values.get("tokenizer.ggml.pre"), header.values["tokenizer.ggml.model"] == "gpt2"
    if is_bpe and rule not in PRE_TOKENIZERS:
        raise UserError(
            f"{header.path}: tokenizer.ggml.pre = {rule!r} is not supported: llama.cpp may split texts differently; "
            f"supported rules: {', '.join(PRE_TOKENIZERS)}; use the safetensors checkpoint"
        )
    begins = rule in WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in header.values
    options = {"add_bos_token": True} if begins else {}
    try:
        tokenizer: PreTrainedTokenizerBase = _read(header, AutoTokenizer, trust_remote_code=False, **options)
    except UNREADABLE as error:
        raise UserError(f"{header.path}: its tokenizer cannot be read: {flat(error)}") from None
    backend = cast(Any, tokenizer).backend_tokenizer
    if is_bpe:
        backend.model.ignore_merges = rule in WHOLE_WORDS
        if rule == "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif not header.values.get("tokenizer.ggml.add_space_prefix", True) and "gemma" not in header.architecture:
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "\u2581"), None
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def _model(header: GgufHeader, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the dequantized model. Raises UserError if the weights in the file do not match the model."""
    options = {"config": config, "dtype": dtype, "output_loading_info": True, "trust_remote_code": False}
    # accept wrong shapes here: `check_report` refuses them with a clear error
    model, report = _read(header, AutoModelForCausalLM, ignore_mismatched_sizes=True, **options)
    check_report(model, report, {}, str(header.path))
    used = sum(parameter.numel() for parameter in model.parameters())  # parameters() yields tied weights once
    if used != header.elements:
        raise UserError(
            f"{header.path}: it has {header.elements:,} weights, but transformers' {config.model_type} has {used:,}, "
            "so some would be left out; use the safetensors checkpoint"
        )
    # with these attributes, transformers would not save the dequantized weights as plain weights
    model.is_quantized, model.hf_quantizer = False, None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if getattr(holder, name, None) is not None:
            delattr(holder, name)
    model.generation_config = GenerationConfig(**_token_ids(header))  # GGUF stores no sampling parameters
    return cast(PreTrainedModel, model)


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Return the ids of BOS, EOS and padding. An end-of-turn token also counts as EOS, because it ends an answer."""
    ids = {name: header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = [*dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None)]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"] if ids["padding"] is not None else (ends or [None])[0],
    }
