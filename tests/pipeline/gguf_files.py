"""Tiny GGUF files of the library's models, written by the `gguf` package as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

TEXTS = ["The Eagle is a cheap pub near the river.", "name[The Eagle], area[riverside]", "In 1987 it cost £20-25."] * 4
CUTS = [  # each of them tells rules apart
    *("x  5", "1\n\n2", "    5 apples", "| a |    1 |", "In 1987", "12345678 and 1,234,567.89", "a1b22c333d4444"),
    *("  two spaces", "ends in spaces   ", "tab\t\there", "\n\n\n", "line\r\nbreak\r\n\r\nagain", " \n \n x"),
    *("a\n b\n  c", "I'm, you're, we'LL, don'T, O'Neil's 'S 'sss", "it's 'tis 'Re 'VE 'D", "(hello)[world]{x}<y>"),
    *("a--b...c!!!  d??\n", "CamelCaseHTTPServer fooBAR Foo", "été ÉCOLE naïveÉ Straße ÄÖÜ", "здравствуй МИР"),
    *(
        "你好，世界123",
        "日本語テスト 한국어",
        "½ ² ٣٤ Ⅳ 五",
        "😀 👍🏽 e\u0301 a\u0308b",
        "price: $5.00/kg; 50%=half & more",
    ),
    *("https://a.b/c?d=e#f_g~h", "a\u00a0b\u3000c\u200bd", "x=1;y+=2;// done\n\treturn x;\n"),
    *("__init__ snake_case kebab-case", "...\n\n...", "'", " ", "\n", "a", "5", " 5", "55 5 555"),
    "hello worldwide hello",
]
UNMERGED = ["hello", "Ġworldwide"]  # words of the vocabulary to which no merges lead
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = {  # GGUF's key -> names of it in the library's configs
    "context_length": ("max_position_embeddings", "n_positions"),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
}


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of some 300 tokens that cuts text as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def uncut_tokenizer() -> Tokenizer:
    """A byte-level BPE whose merges cross every place where texts may be cut, so that its ids show each cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=5,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CUTS, trainer)
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    vocab |= {word: len(vocab) + place for place, word in enumerate(UNMERGED)}
    return Tokenizer.from_str(json.dumps(saved))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    tokenizer: Tokenizer | None = None,
    pre: str | None = "gpt-2",
    quantized: bool = False,
    without: str = "",
    template: str | None = TEMPLATE,
    **entries: Any,
) -> Path:
    """Write the model with a tokenizer, default that of `byte_level_tokenizer`.

    Args:
        pre: name of the rule by which texts are cut; None leaves it out.
        quantized: products' weights as Q8_0.
        without: leave out the entries whose key begins so.
        entries: further entries, with __ for the dot, and list[float] tensors for names that end in ".weight".
    """
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=False)
    for key, value in {
        **_of_model(model, architecture),
        **_of_tokenizer(tokenizer or byte_level_tokenizer(), template),
    }.items():
        if not (without and key.startswith(without)):
            _add(writer, key, value)
    if pre is not None and without != "tokenizer.":
        _add(writer, "tokenizer.ggml.pre", pre)
    tensors = dict(_tensors(model, architecture))
    for name, value in entries.items():
        key = name.replace("__", ".")
        if key.endswith(".weight"):
            tensors[key] = np.array(value, dtype=np.float32)
        else:
            _add(writer, key, value)
    for name, values in tensors.items():
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _of_model(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = model.config
    values: dict[str, Any] = {"general.name": "tiny"}
    for key, names in KEYS.items():
        found = [value for name in names if (value := getattr(config, name, None)) is not None]
        if found:
            values[f"{architecture}.{key}"] = found[0]
    if hasattr(config, "rms_norm_eps"):
        values[f"{architecture}.attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values[f"{architecture}.rope.dimension_count"] = head
        values[f"{architecture}.rope.freq_base"] = float(_theta(config.rope_parameters))
    else:
        values[f"{architecture}.attention.layer_norm_epsilon"] = float(config.layer_norm_epsilon)
    return values


def _theta(rope: dict[str, Any]) -> float:
    return float(rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"])


def _of_tokenizer(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    saved = json.loads(tokenizer.to_str())
    tokens = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].get)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("</s>"),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return values if template is None else {**values, "tokenizer.chat_template": template}


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """The parameters by GGUF's names, in its layout."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, name
        if architecture == "llama" and found.endswith(("attn_q", "attn_k")):
            values = _interleaved(values, model.config, found.endswith("attn_q"))
        if architecture.startswith("gemma") and found.endswith("norm"):
            values = values + 1
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:  # a Conv1D
            values = values.T
        tensors[f"{found}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def _interleaved(values: np.ndarray, config: Any, queries: bool) -> np.ndarray:
    """Queries or keys with the two halves of each head's rope interleaved."""
    heads = config.num_attention_heads if queries else config.num_key_value_heads
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
