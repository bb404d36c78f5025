"""Parts of a text, joined, are the text, whatever the tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.engine.constraints.reasoning import Reasoning
from actors.engine.model.loading import load_tokenizer
from actors.engine.sampling.stopping import StopStrings
from actors.serving.texts import AnswerStream

PIECES = ["<think>", "</think>", "<", "yes ", " \n"]


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint: Path) -> Any:
    return load_tokenizer(chat_checkpoint)


def decode_with(tokenizer: Any) -> Any:
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def characters(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@given(st.lists(st.lists(st.integers(0, 280), max_size=5), max_size=12), st.data())
def test_parts_joined_are_the_text(tokenizer: Any, steps: list[list[int]], data: st.DataObject) -> None:
    decode = decode_with(tokenizer)
    text = decode([token for step in steps for token in step])
    stops = data.draw(st.lists(st.sampled_from([text[3:6], text[4:5], "na", "zz", "\n"]).filter(bool), max_size=3))
    stream = AnswerStream(decode, StopStrings(stops, decode) if stops else None)
    sent: list[int] = []
    joined = ""
    for step in steps:
        sent += step
        joined += stream.push(step)[0]
        assert text.startswith(joined)
        if stops and StopStrings(stops, decode).ended(sent):
            break
    whole = StopStrings(stops, decode).cut(sent) if stops else decode(sent)
    assert whole.startswith(joined)  # no part of a stop string has been sent
    assert joined + stream.finish(whole)[0] == whole


def test_a_stop_string_before_the_minimum_length_holds_no_text_back() -> None:
    stream = AnswerStream(characters, StopStrings(["."], characters, min_new_tokens=3))
    assert "".join(stream.push([ord(one)])[0] for one in "a.bc.d") == "a.bc"


def test_a_stop_string_in_the_thinking_ends_no_streamed_text() -> None:
    answer_start = partial(Reasoning().answer_start, begun=True)
    stream = AnswerStream(characters, StopStrings(["."], characters, answer_start=answer_start))
    assert "".join(stream.push([ord(one)])[0] for one in "a.b</think>so. No") == "a.b</think>so"


@example([" \n", "</think>", "yes "], [1] * 60, Reasoning(), False)
@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(PIECES), max_size=7),
    st.lists(st.integers(1, 9), max_size=30),
    st.sampled_from([None, Reasoning()]),
    st.booleans(),
)
def test_parts_joined_are_thinking_and_text(
    pieces: list[str], cuts: list[int], marks: Reasoning | None, begun: bool
) -> None:
    """The answer comes in pieces of `cuts` characters."""
    raw, place, parts = "".join(pieces), 0, list[tuple[str, str]]()
    stream = AnswerStream(characters, marks=marks, begun=begun)
    for cut in [*cuts, len(raw)]:
        parts.append(stream.push([ord(character) for character in raw[place : place + cut]]))
        place += cut
    thinking, text = (None, raw) if marks is None else marks.split(raw, begun=begun)
    parts.append(stream.finish(text, thinking))
    got = ["".join(part) for part in zip(*parts, strict=True)]
    want = [text, thinking or ""]
    if marks is not None and not begun and not raw.lstrip().startswith(marks.start):
        want = [(thinking or "") + text, ""]  # only its end has told that it was thinking
    assert got == want
