"""Token ids are those of the library tokenizers with tokenizer.json, whatever class another file names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from actors.engine.errors import UserError
from actors.engine.model.families import FAMILIES
from actors.engine.model.tokenizer import TEXTS, difference, load_tokenizer

CLASSES = (
    *(None, "GPT2Tokenizer", "GPT2TokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"),
    *("Qwen2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "Own"),
)
GROUPS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES: dict[str, Any] = {  # name -> the rule that cuts text before the merges
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "groups": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GROUPS), "isolated"), BYTES]),
    "sentencepiece": None,
}
CORPUS = ["x  5 12 345 1987 | id |\n\n the end can't I'LL name[The Eagle], Grüße 日本語 हिन्दी 👩‍👩‍👧"] * 50


def tokenizer_file(rule: str) -> Tokenizer:
    """A small tokenizer, trained on `CORPUS`."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    if rule == "sentencepiece":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = RULES[rule], decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def folder_of(folder: Path, file: Tokenizer, model: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model, "vocab_size": 600}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_ids_are_those_of_the_file_for_every_model_and_class(tmp_path: Path, rule: str) -> None:
    file = tokenizer_file(rule)
    for model in FAMILIES:
        for name in CLASSES:
            declared = {} if name is None else {"tokenizer_class": name}
            tokenizer = load_tokenizer(folder_of(tmp_path / "model", file, model, **declared))
            for text in TEXTS:
                ids = file.encode(text).ids
                assert tokenizer(text)["input_ids"] == ids, (model, name, text)
                bare = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert bare == ids[1:] and tokenizer.decode(bare) == file.decode(bare, skip_special_tokens=False), (
                    model,
                    name,
                    text,
                )


FILES = {rule: tokenizer_file(rule) for rule in RULES}
PIECES = st.sampled_from(
    [*"0159 \t\n\r|.,'", "  ", "\r\n", "'s", "word", "Ü", "語", "ह", "👍🏽", "\u200d", "\u00a0", "<s>"]
)


@given(st.sampled_from(sorted(RULES)), st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=30))
def test_any_text_has_the_ids_of_the_file(tmp_path_factory: pytest.TempPathFactory, rule: str, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / f"any-{rule}"
    if not folder.exists():
        folder_of(folder, FILES[rule], "llama", tokenizer_class="GPT2Tokenizer")
    assert load_tokenizer(folder)(text)["input_ids"] == FILES[rule].encode(text).ids


def test_special_tokens_that_no_file_names_are_those_of_the_class(tmp_path: Path) -> None:
    """GPT-2 is published without them. A token that the vocabulary lacks is not added."""
    found = load_tokenizer(folder_of(tmp_path / "a", FILES["gpt2"], "gpt2"))
    assert (found.eos_token, found.bos_token, found.pad_token) == ("<|endoftext|>", "<|endoftext|>", None)
    found = load_tokenizer(folder_of(tmp_path / "b", FILES["gpt2"], "llama", tokenizer_class="GemmaTokenizer"))
    assert (found.eos_token, found.unk_token, len(found)) == (None, "<unk>", FILES["gpt2"].get_vocab_size())
    named = folder_of(tmp_path / "c", FILES["gpt2"], "gpt2", eos_token="</s>", chat_template="{{ messages }}")
    found = load_tokenizer(named)
    assert (found.eos_token, found.bos_token, found.chat_template) == ("</s>", None, "{{ messages }}")


@pytest.mark.parametrize("asked", [True, False])
def test_the_file_decides_about_the_first_token(tmp_path: Path, asked: bool) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": asked, "add_eos_token": asked}
    folder = folder_of(tmp_path / "a", FILES["digits"], "llama", **tokens)
    assert load_tokenizer(folder)("x  5")["input_ids"] == FILES["digits"].encode("x  5").ids


def test_a_checkpoint_without_the_file_is_loaded_by_its_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", FILES["gpt2"], "gpt2", tokenizer_class="GPT2Tokenizer")
    AutoTokenizer.from_pretrained(folder).backend_tokenizer.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder)("x  5")["input_ids"] == FILES["gpt2"].encode("x  5").ids[1:]
    (folder / "vocab.json").unlink()
    with pytest.raises(UserError, match=rf"^{folder}: the tokenizer cannot be loaded: "):
        load_tokenizer(folder)


def test_code_of_a_checkpoint_is_not_run_even_if_a_user_would_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    folder = folder_of(tmp_path / "a", FILES["gpt2"], "llama", **own)
    (folder / "tokenizer.json").unlink()
    (folder / "own.py").write_text("raise SystemExit")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(UserError, match="custom code"):
        load_tokenizer(folder)


def test_a_difference_to_other_programs_is_known(tmp_path: Path) -> None:
    right = folder_of(tmp_path / "a", FILES["digits"], "llama", tokenizer_class="TokenizersBackend")
    assert difference(right) is None
    for name, said in (
        ("GPT2Tokenizer", "GPT2Tokenizer cuts 'x  5"),
        ("CodeLlamaTokenizer", "CodeLlamaTokenizer cuts"),
    ):
        found = difference(folder_of(tmp_path / "b", FILES["digits"], "llama", tokenizer_class=name))
        assert found is not None and said in found
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()
    assert difference(tmp_path / "b") is None
