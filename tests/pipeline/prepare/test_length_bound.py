"""A text that cannot fit the context is refused before it is tokenized; a text that fits never is."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_probe import watch_peak
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.engine.checkpoint.loading import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.prepare import tokenizer as tokenizers
from pipeline.prepare.length_bound import LengthBound
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table

TEXTS = [
    "the river is near the pub " * 40,
    "Caf\u00e9 Adriatic, gr\u00fc\u00df Gott \u4e2d\u6587\u5b57 \U0001f600\U0001f600" * 20,
    " " * 300 + "\n\n\t" * 50 + "\u3000\u2003" * 30,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 30,
    unicodedata.normalize("NFD", "\u01d5\u1f82\ud55c\uad6d\u0390\u1ec7" * 60),
    "<x>  \u2003 \n" * 40 + "\u2581\u2581\u2581 \u2581" * 40,
]


DIFFICULT = "a \t\u0301e\u00e9\u1100\u1161\u11a8\u2581\u3000<x>\n"


def trained(normalizer: Any, pre_tokenizer: Any, byte_fallback: bool, *added: AddedToken) -> PreTrainedTokenizerFast:
    """A BPE tokenizer whose merges come from `TEXTS`, so that these are as few tokens as can be."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    alphabet = [] if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    if byte_fallback:
        model = json.loads(backend.to_str())["model"]
        vocabulary = [*model["vocab"], *(f"<0x{byte:02X}>" for byte in range(256))]
        ids = {token: number for number, token in enumerate(vocabulary)}
        backend.model = models.BPE(ids, [tuple(pair) for pair in model["merges"]], byte_fallback=True)
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def tokenizer_cases() -> dict[str, PreTrainedTokenizerFast]:
    split = pre_tokenizers.Split(" ?[a-z]+", "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spaces = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return {
        "byte level": trained(None, pre_tokenizers.ByteLevel(), False),
        "byte level, whole texts": trained(None, byte_level, False),
        "split, byte level": trained(None, pre_tokenizers.Sequence([split, byte_level]), False),
        "NFC": trained(normalizers.NFC(), byte_level, False),
        "NFC, stripping token": trained(normalizers.NFC(), byte_level, False, AddedToken("<x>", rstrip=True)),
        "stripping token": trained(None, byte_level, False, AddedToken("<x>", lstrip=True, rstrip=True)),
        "byte fallback": trained(spaces, None, True),
        "byte fallback, metaspace": trained(None, pre_tokenizers.Metaspace(), True),
    }


CASES = tokenizer_cases()


@pytest.mark.parametrize("name", CASES)
@given(text=st.text(max_size=60) | st.text(DIFFICULT, max_size=60))
@example(text="")
@settings(max_examples=60, deadline=None)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = CASES[name]
    bound = LengthBound(tokenizer)
    assert bound.is_known
    for sample in (text, text * 20, *TEXTS):
        tokens = tokenizer(sample, add_special_tokens=False)["input_ids"]
        assert bound.fewest_tokens(sample, 10**9) <= len(tokens)


def test_the_bound_is_exact_where_all_tokens_are_the_longest() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*alphabet, "aa", "aaaa", "ab"])}
    backend = Tokenizer(models.BPE(ids, [("a", "a"), ("aa", "aa"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bound = LengthBound(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [bound.fewest_tokens(text, 10**9) for text in ("a" * 16, "ab" * 16, "c" * 16, "")] == [4, 12, 16, 0]
    assert 100 < bound.fewest_tokens("c" * 10**7, 100) < 2**20 + 100  # stops where it is enough


@pytest.mark.parametrize(
    "backend",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0)),
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.BPE({"a": 1}, [], byte_fallback=True)),
    ],
    ids=["WordPiece", "Unigram", "WordLevel", "fused unknown", "bytes missing"],
)
def test_a_tokenizer_of_unknown_lengths_has_no_bound(backend: Tokenizer) -> None:
    bound = LengthBound(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not bound.is_known and bound.fewest_tokens("b" * 10**6, 64) == 0


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (normalizers.NFKC(), pre_tokenizers.ByteLevel()),
        (normalizers.Strip(), pre_tokenizers.ByteLevel()),
        (normalizers.Replace("a", ""), pre_tokenizers.ByteLevel()),
        (normalizers.Replace(" ", "\u2581"), pre_tokenizers.ByteLevel()),
        (None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
        (None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
    ],
)
def test_a_stage_that_removes_text_leaves_no_bound(normalizer: Any, pre_tokenizer: Any) -> None:
    assert not LengthBound(trained(normalizer, pre_tokenizer, False)).is_known


def spec(checkpoint: Path, **changes: Any) -> PromptSpec:
    sampling = SamplingParams(max_new_tokens=10)
    return PromptSpec(str(checkpoint), 300, 64, **{"column": "prompt", "sampling": sampling, **changes})


@pytest.mark.parametrize("settings", [{}, {"choices": ("yes", "no")}, {"column": None, "template": "{{ prompt }}"}])
def test_a_huge_prompt_is_an_error_that_takes_little_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    load_tokenizer(checkpoint)
    tokenized: list[str] = []
    monkeypatch.setattr(
        "pipeline.prepare.prompts.tokenize",
        lambda checkpoint, texts, special_tokens: tokenized.extend(texts) or iter([[5]] * len(texts)),
    )
    table, peak = pa.table({"prompt": ["word " * 40_000_000, "fine"]}), watch_peak()
    done = prepare_table(table, spec(checkpoint, **settings))
    grown = peak()
    error = done[ERROR].to_pylist()
    assert error[0].startswith(("prompt of at least ", "template: makes more than ")) and error[1] is None
    assert tokenized == ["fine"] and grown < 800 * 2**20


def test_messages_and_templates_have_the_same_bound(chat_checkpoint: Path) -> None:
    from pipeline.prepare.chat import Chat

    for values in ({"template": "{{ prompt }}"}, {"messages": "prompt", "chat": Chat()}):
        content: Any = "x" * 3_000_000
        prompt = [{"role": "user", "content": content}] if "messages" in values else content
        done = prepare_table(pa.table({"prompt": [prompt]}), spec(chat_checkpoint, column=None, **values))
        (error,) = done[ERROR].to_pylist()
        assert error.startswith("prompt of at least ") and error.endswith("tokens leaves no room in a context of 64")


def test_truncation_reads_the_end_of_a_huge_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.prepare.prompt_row.TRUNCATED_CHARACTERS", 100_000)
    text = "word " * 30_000 + "at the end"
    done = prepare_table(pa.table({"prompt": [text]}), spec(checkpoint, too_long="truncate_left"))
    assert done[ERROR].to_pylist() == [None]
    assert done[PROMPT_IDS].to_pylist() == [load_tokenizer(checkpoint)(text)["input_ids"][-54:]]


def test_a_text_that_is_not_long_is_counted_exactly(checkpoint: Path) -> None:
    text = "x" * tokenizers.SHORT_CHARACTERS
    tokens = len(load_tokenizer(checkpoint)(text)["input_ids"])
    done = prepare_table(pa.table({"prompt": [text]}), spec(checkpoint))
    assert done[ERROR].to_pylist() == [f"prompt of {tokens} tokens leaves no room in a context of 64"]
