"""Thinking before an answer: split from free texts, and before a constraint that holds for the answer alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import AfterReasoning, Reasoning
from actors.engine.types import Completion, FinishReason
from actors.generator import Generator
from actors.settings import EngineSettings

END, VOCAB = 2, 300


def make(checkpoint: Path, **changes: Any) -> Generator:
    sampling = {"max_new_tokens": 40, "temperature": 1.5}
    return Generator(EngineSettings(str(checkpoint), dtype="float32", device="cpu", sampling=sampling, **changes))


@pytest.mark.parametrize(
    ("text", "begun", "split"),
    [
        ("an answer", False, (None, "an answer")),
        ("<think>why</think> so", False, ("why", " so")),
        (" \n<think>why</think>so", False, ("why", "so")),
        ("why</think>so", False, ("why", "so")),
        ("why</think>so", True, ("why", "so")),
        ("why", True, ("why", "")),
        ("<think>why", False, ("why", "")),
        ("a <think>b", False, (None, "a <think>b")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_texts_are_split_at_the_marks(text: str, begun: bool, split: tuple[str | None, str]) -> None:
    assert Reasoning().split(text, begun=begun) == split


def test_a_prompt_may_begin_the_thinking() -> None:
    marks = Reasoning("[", "]")
    assert marks.begun_by("user: [") and marks.begun_by("[a] [")
    assert not marks.begun_by("user: ") and not marks.begun_by("[a]")


def test_a_form_holds_after_the_thinking(checkpoint: Path) -> None:
    """The tiny model ends its thinking with a letter, which comes by chance."""
    generator = make(checkpoint, reasoning={"start": "[", "end": "e"}, output_format={"regex": "(yes|no) [0-9]{2}"})
    done = generator({"prompt": [f"a {row}" for row in range(24)]})
    whole = 0
    for text, thinking, error in zip(done["generated_text"], done["reasoning"], done["error"], strict=True):
        assert "e" not in thinking
        if error is None:
            assert regex.fullmatch("(yes|no) [0-9]{2}", text)
            whole += 1
        else:
            assert error == "regex: the answer was cut off after 40 tokens: raise max_new_tokens"
    assert whole > 12


def test_choices_after_thinking_have_their_probability(checkpoint: Path) -> None:
    generator = make(checkpoint, reasoning={"start": "[", "end": "e"}, choices=["yes", "no"])
    done = generator({"prompt": [f"a {row}" for row in range(12)]})
    for text, probability, error in zip(done["generated_text"], done["choice_probability"], done["error"], strict=True):
        if error is None:
            assert text in ("yes", "no") and 0 < probability <= 1
        else:
            assert "cut off" in error and probability is None


def test_a_label_that_the_limit_cuts_off_costs_no_other_row(checkpoint: Path) -> None:
    generator = make(checkpoint, reasoning={"start": "[", "end": "e"}, choices=["a pub in town", "a pub in Rome"])
    row = generator.builder.prompt("a 0")
    request = generator.builder.requests(row)[0]
    tokens = generator.tokenizer("xe", add_special_tokens=False)["input_ids"]
    tokens += generator.tokenizer("a p", add_special_tokens=False)["input_ids"]
    cut_off = Completion(tuple(tokens), FinishReason.LENGTH, None, error="choices: cut off")
    answer = generator.completed(row, 0, 0, request, cut_off)
    assert (answer.generated_text, answer.reasoning, answer.error) == ("", "x", "choices: cut off")


def test_thinking_allows_all_tokens_but_those_that_end_an_answer(checkpoint: Path) -> None:
    tokenizer = make(checkpoint).tokenizer
    inner = GrammarCompiler(tokenizer, VOCAB, [END]).compile(OutputFormat("regex", "[b-d]"))
    progress = AfterReasoning(inner, Reasoning("<", ">"), tokenizer.decode, [END]).begin()
    bits = np.zeros(10, dtype=np.int32)

    def allowed() -> list[int]:
        progress.write(bits)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB].nonzero()[0].tolist()

    assert allowed() == [token for token in range(VOCAB) if token != END]
    assert all(progress.allows(token) == (token != END) for token in range(VOCAB))
    [*_, letter, end] = tokenizer("x>", add_special_tokens=False)["input_ids"]
    assert not progress.advance(letter) and not progress.is_complete()
    assert not progress.advance(end)
    assert sorted(tokenizer.decode([token]) for token in allowed()) == ["b", "c", "d"]
    assert all(progress.allows(token) == (token in allowed()) for token in range(VOCAB))
    assert progress.advance(allowed()[0]) and progress.is_complete()


def test_most_tokens_of_thinking_are_not_decoded(checkpoint: Path) -> None:
    """Each kind of token once, and then only those that may hold the last character of the end."""
    tokenizer, decoded = make(checkpoint).tokenizer, []

    def decode(tokens: list[int]) -> str:
        decoded.append(tokens)
        return str(tokenizer.decode(tokens))

    inner = GrammarCompiler(tokenizer, VOCAB, [END]).compile(OutputFormat("regex", "[b-d]"))
    constraint = AfterReasoning(inner, Reasoning("<", ">"), decode, [END])
    progress = constraint.begin()
    *thinking, end = tokenizer(f"{'xyz ' * 50}>", add_special_tokens=False)["input_ids"]
    assert not any(progress.advance(token) for token in thinking) and len(decoded) <= len({*thinking})
    progress.advance(end)
    letter = tokenizer("xb", add_special_tokens=False)["input_ids"][-1]
    assert progress.allows(letter) and not progress.allows(END)
    del decoded[:]
    thought, answer = constraint.split([*thinking, end, letter], None)
    assert thought.strip().endswith("xyz") and answer == "b" and len(decoded) < 10


def test_free_answers_are_split_too(checkpoint: Path) -> None:
    plain, split = make(checkpoint), make(checkpoint, reasoning={"start": "[", "end": "e"})
    batch = {"prompt": [f"a {row}" for row in range(8)]}
    whole, parts = plain(batch)["generated_text"], split(batch)
    assert any(thinking is not None for thinking in parts["reasoning"])
    for text, thinking, answer in zip(whole, parts["reasoning"], parts["generated_text"], strict=True):
        if "e" in text:
            assert (thinking, answer) == tuple(part.strip() for part in text.split("e", 1))
        else:
            assert (thinking, answer) == (None, text)


@pytest.mark.parametrize(
    ("text", "begun", "start"),
    [
        ("an answer", False, 0),
        ("", False, 0),
        ("", True, None),
        ("<th", False, None),
        ("<then", False, 0),
        (" <think>a", False, None),
        ("a", True, None),
        ("<think>a</think>b", False, 16),
        ("a</think>b", True, 9),
        ("a</think>b", False, 0),
    ],
)
def test_the_answer_begins_behind_the_thinking(text: str, begun: bool, start: int | None) -> None:
    assert Reasoning().answer_start(text, begun=begun) == start


def test_stop_strings_end_the_answer_and_not_the_thinking(checkpoint: Path) -> None:
    """A stop string inside thinking ended the row with an empty answer."""
    thinking, stops = {"start": "[", "end": "e"}, {"max_new_tokens": 40, "temperature": 1.5, "stop": ["a", "o"]}
    plain = make(checkpoint, reasoning=thinking)
    stopped = Generator(
        EngineSettings(str(checkpoint), dtype="float32", device="cpu", sampling=stops, reasoning=thinking)
    )
    batch = {"prompt": [f"a [{row}" for row in range(16)]}  # the prompt begins the thinking
    expected, got = plain(batch), stopped(batch)
    assert list(got["reasoning"]) == list(expected["reasoning"])
    assert any({*thought} & {*"ao"} for thought in got["reasoning"])
    for text, whole in zip(got["generated_text"], expected["generated_text"], strict=True):
        assert text == min((whole.partition(stop)[0] for stop in "ao"), key=len).strip()


def test_a_mark_that_the_user_writes_begins_no_thinking(checkpoint: Path) -> None:
    """In a chat only the text after the last special token is the template's."""
    builder = make(checkpoint, reasoning={"start": "[", "end": "e"}).builder
    user, opened = (list(builder.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("a [b", "a ["))
    assert builder.answer_start(user)("x") is None  # without special tokens the prompt is one text
    assert builder.answer_start([*user, END, *user[:1]])("x") == 0
    assert builder.answer_start([*user, END, *opened])("x") is None


def test_thinking_that_the_prompt_ends_is_over(checkpoint: Path) -> None:
    """Chat templates write an empty thinking to switch it off; a label was then awaited after a second thinking."""
    how: dict[str, Any] = {"choices": ["yes", "no"], "reasoning": {"start": "[", "end": "e"}}
    done = make(checkpoint, **how)({"prompt": ["a [e", "a [ e "]})
    plain = make(checkpoint, choices=how["choices"])({"prompt": ["a [e", "a [ e "]})
    assert list(done["generated_text"]) == list(plain["generated_text"]) and list(done["error"]) == [None, None]


def test_tokens_are_special_that_the_tokenizer_does_not_name(checkpoint: Path, tmp_path: Path) -> None:
    """SmolLM2's tokenizer marks 17 tokens as special and names 3."""
    copied = shutil.copytree(checkpoint, tmp_path / "marked")
    values = json.loads((copied / "tokenizer.json").read_text())
    added = {**values["added_tokens"][0], "id": 7, "content": next(t for t, n in vocabulary(values).items() if n == 7)}
    (copied / "tokenizer.json").write_text(json.dumps({**values, "added_tokens": [*values["added_tokens"], added]}))
    special = make(copied).builder.special_ids
    assert special[added["content"]] == 7 and special["</s>"] == END


def vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = tokenizer["model"]["vocab"]
    return found


def test_marks_without_text_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"reasoning.end is empty"):
        make(checkpoint, reasoning={"end": " "})
    with pytest.raises(ValueError, match="reasoning: '</s>' is a special token"):
        make(checkpoint, reasoning={"end": "</s>"})
