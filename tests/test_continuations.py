"""Where prompts end and continuations begin, held against lm-eval's rule and against the tokens of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import SENTENCES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from actors.continuations import boundary_texts, checked_texts, split
from actors.engine.errors import UserError


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as most models have; template: how special tokens are added."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator([text for pair in SENTENCES.items() for text in pair], trainer)
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


PLAIN, BEGINS, CLOSES = tokenizer("$A"), tokenizer("<s> $A"), tokenizer("<s> $A </s>")
TEXTS = st.text(alphabet="ab .\n=:Zizi", min_size=1, max_size=12)


def ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return found


def encoded(tokenizer: Any, prompt: str, texts: list[str], is_chat: bool = False) -> tuple[list[int], list[list[int]]]:
    parts = boundary_texts(tokenizer, prompt, texts, is_chat=is_chat)
    return split(tokenizer, [ids(tokenizer, *part) for part in parts], is_chat=is_chat)


def lm_eval_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """`TemplateLM._encode_pair` of lm-eval 0.4."""
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole, before = ids(tokenizer, context + continuation), ids(tokenizer, context)
    return before, whole[len(before) :]


@given(st.text(alphabet="ab .\n=:Zizi", max_size=12), st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from([0, 1]))
def test_prompt_and_continuation_are_the_whole_text_and_mostly_lm_evals(
    prompt: str, texts: list[str], which: int
) -> None:
    chosen = (PLAIN, BEGINS)[which]
    found, ways = encoded(chosen, prompt, texts)
    assert found and all(ways)
    for text, way in zip(texts, ways, strict=True):
        whole = ids(chosen, prompt + text)
        assert [*found, *way] == (whole if found != [0] or whole[0] == 0 else [0, *whole])
        before, behind = lm_eval_pair(chosen, prompt, text)
        if before and all(ids(chosen, prompt + one)[: len(before)] == before for one in texts):
            assert (found, way) == (before, behind)


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_continuation() -> None:
    assert encoded(BEGINS, "Zizzi is ", ["a cheap pub", "the"]) == encoded(BEGINS, "Zizzi is", [" a cheap pub", " the"])
    prompt, [way] = encoded(BEGINS, "Zizzi is", [" a cheap pub"])
    assert prompt == ids(BEGINS, "Zizzi is") and way == ids(BEGINS, " a cheap pub", False)


def test_a_token_that_spans_the_boundary_belongs_to_the_continuation_of_each() -> None:
    assert ids(PLAIN, "Zizzi", False) != [*ids(PLAIN, "Ziz", False), *ids(PLAIN, "zi", False)]
    prompt, ways = encoded(BEGINS, "name Ziz", ["zi is", " is"])
    assert [*prompt, *ways[0]] == ids(BEGINS, "name Zizzi is")
    assert [*prompt, *ways[1]] == ids(BEGINS, "name Ziz is")
    assert prompt == ids(BEGINS, "name Ziz")[: len(prompt)] and len(prompt) < len(ids(BEGINS, "name Ziz"))


@pytest.mark.parametrize("chosen", [PLAIN, BEGINS])
@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_the_token_that_begins_a_sequence(chosen: Any, prompt: str) -> None:
    assert encoded(chosen, prompt, ["Zizzi"]) == ([0], [ids(chosen, prompt + "Zizzi", False)])


def test_without_a_token_that_begins_a_sequence_the_one_that_ends_it_or_an_error() -> None:
    bare = tokenizer("$A")
    bare.bos_token = None
    assert encoded(bare, "", ["Zizzi"]) == ([1], [ids(bare, "Zizzi")])
    bare.eos_token = None
    with pytest.raises(UserError, match="prompt is empty, and the tokenizer has no token that begins a sequence"):
        encoded(bare, "", ["Zizzi"])


def test_behind_a_closed_prompt_and_in_a_chat_white_space_stays() -> None:
    assert encoded(CLOSES, "Zizzi is ", ["a pub"]) == (ids(CLOSES, "Zizzi is "), [ids(CLOSES, "a pub", False)])
    prompt, [way] = encoded(CLOSES, "<s>user: hi\n", ["Zizzi"], is_chat=True)
    assert prompt == ids(CLOSES, "<s>user: hi\n", False) and way == ids(CLOSES, "Zizzi", False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "continuations is null or empty"),
        ([], "continuations is null or empty"),
        ("", "continuation 1 is empty; it must be text"),
        (["a", None], "continuation 2 is null; it must be text"),
        (["a", 3], "continuation 2 is of type int; it must be text"),
    ],
)
def test_what_is_no_text_is_named(value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        checked_texts(value)
    assert str(caught.value) == message
