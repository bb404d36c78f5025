"""Parts of a text, joined, are the text, whatever the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.checkpoint.loading import load_tokenizer
from actors.engine.constraints.reasoning import Reasoning
from actors.engine.sampling.stopping import StopStrings
from actors.serving.texts import AnswerStream, Part, TextStream
from actors.tool_calls import ToolFormat, split_calls


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint: Path) -> Any:
    return load_tokenizer(chat_checkpoint)


def decode_with(tokenizer: Any) -> Any:
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


@given(st.lists(st.lists(st.integers(0, 280), max_size=5), max_size=12), st.data())
def test_parts_joined_are_the_text(tokenizer: Any, steps: list[list[int]], data: st.DataObject) -> None:
    decode = decode_with(tokenizer)
    tokens = [token for step in steps for token in step]
    text = decode(tokens)
    stops = data.draw(st.lists(st.sampled_from([text[3:6], text[4:5], "na", "zz", "\n"]).filter(bool), max_size=3))
    stream = TextStream(decode, stops)
    sent: list[int] = []
    joined = ""
    for step in steps:
        sent += step
        joined += stream.push(step)
        assert text.startswith(joined)
        if stops and StopStrings(stops, decode).ended(sent):
            break
    whole = StopStrings(stops, decode).cut(sent) if stops else decode(sent)
    assert whole.startswith(joined)  # no part of a stop string has been sent
    assert joined + stream.finish(whole) == whole


def test_a_character_of_several_tokens_comes_whole(tokenizer: Any) -> None:
    decode = decode_with(tokenizer)
    ids = tokenizer("é😀!", add_special_tokens=False)["input_ids"]
    stream = TextStream(decode)
    parts = [stream.push([token]) for token in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + stream.finish(decode(ids)) == decode(ids)
    assert any(parts)


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    '{"name": "f", "arguments": {"a": 1}}',
    "</tool_call>",
    "<",
    "yes ",
    " \n",
]


def joined_parts(raw: str, cuts: list[int], **how: Any) -> Part:
    """The parts of a text that comes character by character, `cuts` of them at once."""
    stream = AnswerStream(TextStream(lambda tokens: "".join(map(chr, tokens))), **how)
    marks, calls = how.get("marks"), how.get("calls")
    whole, place = Part(), 0
    for cut in cuts:
        whole += stream.push([ord(character) for character in raw[place : place + cut]])
        place += cut
    whole += stream.push([ord(character) for character in raw[place:]])
    thinking, text = (None, raw) if marks is None else marks.split(raw, begun=how["begun"])
    found: list[Any] = []
    if calls is not None:
        try:
            text, found = split_calls(text, calls)
        except ValueError:
            assert "<tool_call>" not in whole.text
    return whole + stream.finish(text, thinking, has_calls=bool(found))


@given(st.lists(st.sampled_from(PIECES), max_size=7), st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_parts_joined_are_thinking_and_text(pieces: list[str], cuts: list[int], begun: bool) -> None:
    marks, raw = Reasoning(), "".join(pieces)
    got = joined_parts(raw, cuts, marks=marks, begun=begun)
    thinking, text = marks.split(raw, begun=begun)
    if begun or raw.lstrip().startswith(marks.start):
        assert got == Part(text, thinking or "")
    else:  # only its end has told that it was thinking, so that some of it has been sent as text
        assert got.text + got.thinking in (raw, raw.replace(marks.end, "", 1))


def test_a_stop_string_in_the_thinking_ends_no_streamed_text() -> None:
    def start(text: str) -> int | None:
        return Reasoning().answer_start(text, begun=True)

    stream = TextStream(lambda tokens: "".join(map(chr, tokens)), ["."], answer_start=start)
    assert "".join(stream.push([ord(one)]) for one in "a.b</think>so. No") == "a.b</think>so"


@given(st.lists(st.sampled_from(PIECES), max_size=7), st.lists(st.integers(1, 9), max_size=30))
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_calls_are_no_part_of_a_streamed_text(form: ToolFormat, pieces: list[str], cuts: list[int]) -> None:
    raw = "".join(pieces)
    try:
        text, calls = split_calls(raw, form)
    except ValueError:
        text, calls = raw, []
    got = joined_parts(raw, cuts, calls=form)
    assert got.thinking == "" and (got.text.strip() if calls else got.text) == text
