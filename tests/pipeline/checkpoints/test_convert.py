"""GGUF files of tiny models become checkpoints with the same logits and the same tokens, or are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CUTS, SPECIAL, TEMPLATE, TEXTS, byte_level_tokenizer, uncut_tokenizer, write_gguf
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect, load_tokenizer
from pipeline.checkpoints.convert import PRE_TOKENIZERS, convert
from pipeline.cli.app import app

VOCAB = byte_level_tokenizer().get_vocab_size()
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": None}  # the last one is full attention
SCALING = {"query_pre_attn_scalar": 256}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # test -> tiny model, GGUF's architecture, changes of its config
    "llama": ("llama", "llama", {}),
    "llama, tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama, head_dim": ("llama", "llama", {"head_dim": 12}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "phi3": ("phi3-full", "phi3", {"partial_rotary_factor": 1.0}),
    "phi3, window": ("phi3", "phi3", {"partial_rotary_factor": 1.0}),
    "gpt2": ("gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    # what their files leave out has the library's defaults, those of the published models
    "gemma2": ("gemma2", "gemma2", {**SCALING, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", "gemma3", {**SCALING, **SIX_LAYERS, "rope_local_base_freq": 10000.0}),
}
PROMPT = torch.arange(3, 23)[None]


def made(name: str) -> tuple[Any, str]:
    """A tiny model with the tokenizer's vocabulary, and GGUF's name of its architecture."""
    tiny, architecture, keys = MODELS[name]
    keys = {"num_hidden_layers": 2, "vocab_size": VOCAB, **keys}
    return tiny_model(tiny, **keys), architecture


def converted(source: Path, output: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    """Convert; the lines reported."""
    lines: list[str] = []
    convert(source, output, dtype, lines.append)
    return lines


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(PROMPT).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    model, architecture = made(name)
    converted(write_gguf(tmp_path / "m.gguf", model, architecture), tmp_path / "out")
    assert inspect(tmp_path / "out").num_layers == model.config.num_hidden_layers
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(result), logits(model), rtol=1e-5, atol=1e-5)


def test_quantized_weights_are_those_that_transformers_loads(tmp_path: Path) -> None:
    model, architecture = made("llama")
    source = write_gguf(tmp_path / "m.gguf", model, architecture, quantized=True, template=None)
    lines = converted(source, tmp_path / "out")
    assert lines[-2] == "the file has no chat template, so prompts can be text but not messages"
    assert "quantized weights (Q8_0) keep the precision of their quantization" in lines
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert torch.equal(logits(result), logits(theirs))
    assert not torch.equal(logits(result), logits(model))
    assert not hasattr(result.config, "quantization_config")


def test_tokens_template_and_ends_are_those_of_the_file(tmp_path: Path) -> None:
    converted(write_gguf(tmp_path / "m.gguf", *made("llama")), tmp_path / "out")
    original, tokenizer = byte_level_tokenizer(), load_tokenizer(tmp_path / "out")
    for text in [*TEXTS, "  two spaces\n\ttab £ \u4f60", "<|im_start|>user\nhi<|im_end|>"]:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == original.encode(text).ids
    assert tokenizer.chat_template == TEMPLATE
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert prompt == original.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    ends = [original.token_to_id("<|im_end|>"), original.token_to_id("</s>")]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends


@pytest.mark.parametrize("rule", PRE_TOKENIZERS)
def test_texts_are_cut_as_llama_cpp_cuts_them(tmp_path: Path, rule: str) -> None:
    """Its ids of a vocabulary whose merges cross every cut, as a file records them."""
    recorded = Path(__file__).parents[1] / "llama_cpp_ids.json"
    tokenizer, wanted = uncut_tokenizer(), json.loads(recorded.read_text())["ids"][rule]
    model = tiny_model("llama", vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    converted(write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer=tokenizer, pre=rule), tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    found = [ours(text, add_special_tokens=False)["input_ids"] for text in CUTS]
    assert {text: (got, want) for text, got, want in zip(CUTS, found, wanted, strict=True) if got != want} == {}


@pytest.mark.parametrize(
    ("rule", "keys", "tokens"),
    [
        ("llama-bpe", {}, ["<s>", "The"]),  # also with a file that does not say so
        ("llama-bpe", {"tokenizer__ggml__add_bos_token": 0}, ["The"]),
        ("gpt-2", {}, ["The"]),
        (None, {}, ["<s>", "\u2581The"]),
        (None, {"tokenizer__ggml__add_space_prefix": 0}, ["<s>", "The"]),
    ],
)
def test_a_text_begins_as_in_llama_cpp(
    tmp_path: Path, rule: str | None, keys: dict[str, Any], tokens: list[str]
) -> None:
    tokenizer = byte_level_tokenizer()
    if rule is None:  # SentencePiece
        vocab = {token: place for place, token in enumerate([*SPECIAL, "\u2581", *"The", "he", "The", "\u2581The"])}
        tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("T", "he"), ("\u2581", "The")]))
        keys = {**keys, "without": "tokenizer.ggml.model", "tokenizer__ggml__model": "llama"}
    model = tiny_model("llama", vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1)
    converted(write_gguf(tmp_path / "m.gguf", model, "llama", tokenizer=tokenizer, pre=rule, **keys), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").tokenize("The", add_special_tokens=True) == tokens


@pytest.mark.parametrize("rule", ["default", "gpt2", "tekken", "gpt-4o", "llama-bpe-2", None])
def test_a_rule_that_is_not_known_is_refused_by_name(tmp_path: Path, rule: str | None) -> None:
    source = write_gguf(tmp_path / "m.gguf", *made("llama"), pre=rule)
    with pytest.raises(
        UserError,
        match=rf"m.gguf: tokenizer.ggml.pre = {rule!r} is not supported: .* supported rules: gpt-2, olmo, smollm",
    ):
        converted(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "its rope is scaled (yarn), which transformers does not read"),
        ({"rope_freqs__weight": [1.0, 2.0, 8.0, 8.0]}, "its rope is scaled (by factors), which transformers does not"),
        ({"llama__attention__sliding_window": 4096}, "it has a sliding window, which transformers does not read"),
        ({"llama__expert_count": 8}, "it is a mixture of experts, which transformers does not read"),
        ({"without": "llama.rope.dim", "llama__rope__dimension_count": 4}, "its rope rotates 4 of 8 dimensions"),
        ({"without": "tokenizer."}, "the file has no tokenizer; give a file that has one"),
        (
            {"token_embd__weight": [[0.0] * 32] * 9},
            "token_embd.weight has 9 rows, but tokenizer.ggml.tokens has 300 entries",
        ),
        ({"blk__0__ffn_up__weight": [[0.0] * 32] * 9}, "mlp.up_proj.weight has shape [9, 32], but config.json needs "),
        ({"split__count": 3}, "one of 3 parts; join them: llama-gguf-split --merge"),
        ({"blk__0__other__weight": [1.0, 2.0]}, "weights, but transformers' llama has"),
    ],
)
def test_a_file_that_transformers_would_read_in_part_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", *made("llama"), **options)
    with pytest.raises(UserError) as caught:
        converted(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{source}: ") and message in str(caught.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_other_architectures_are_refused_by_name_before_weights_are_read(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", *made("llama")).read_bytes()
    length = (5).to_bytes(8, "little")
    for name in ("gemma", "rwkv7"):
        (tmp_path / f"{name}.gguf").write_bytes(data.replace(length + b"llama", length + name.encode()))
        with pytest.raises(UserError, match=f"architecture '{name}' is not supported; supported: llama, qwen2"):
            converted(tmp_path / f"{name}.gguf", tmp_path / "out")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", *made("llama"))
    data = source.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "header.gguf").write_bytes(data[:1000])
    (tmp_path / "other.gguf").write_bytes(b"PK" * 100)
    source.rename(tmp_path / "m-00001-of-00002.gguf")
    for name, message in {
        "none.gguf": "no such file",
        "short.gguf": "damaged or cut short",
        "header.gguf": "damaged or cut short",
        "other.gguf": "not a GGUF file",
        "m-00001-of-00002.gguf": "it is one of 2 parts",
    }.items():
        with pytest.raises(UserError, match=rf"{name}: {message}"):
            converted(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    source, out = write_gguf(tmp_path / "m.gguf", *made("llama")), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for folder in (out, out / "notes.txt"):
        with pytest.raises(UserError, match=rf"^OUT: {folder} exists and is not empty; remove it, or choose a new"):
            converted(source, folder)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    converted(source, out)
    assert inspect(out).num_layers == 2


def test_a_killed_conversion_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further conversion begins again."""
    source, out = write_gguf(tmp_path / "m.gguf", *made("llama")), tmp_path / "out"

    def killed(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            converted(source, out)
    assert not out.exists() and (tmp_path / ".out.partial").is_dir()
    converted(source, out)
    assert inspect(out).num_layers == 2 and not (tmp_path / ".out.partial").exists()


def test_the_command(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", *made("llama"))
    ended = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--dtype", "float32"])
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[-1] == f"checkpoint: {tmp_path / 'out'}"
    ended = CliRunner().invoke(app, ["convert", str(source), "s3://bucket/out"])
    assert ended.exit_code == 2 and "OUT: s3://bucket/out is not local; name a local folder" in ended.stderr
    ended = CliRunner().invoke(app, ["convert", str(tmp_path / "none.gguf"), str(tmp_path / "other")])
    assert ended.exit_code == 2
    assert ended.output.splitlines()[-1] == f"skipdecode: {tmp_path / 'none.gguf'}: no such file"
