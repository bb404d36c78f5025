"""Parts of a text, joined, are the text, whatever the tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.engine.constraints.reasoning import Reasoning
from actors.engine.model.loading import load_tokenizer
from actors.engine.sampling.stopping import StopStrings
from actors.serving.texts import AnswerStream
from actors.tool_calls import ToolFormat, split_calls

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
CUTS = st.lists(st.integers(1, 9), max_size=30)


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


def joined_parts(raw: str, cuts: list[int], **how: Any) -> tuple[str, str]:
    """Text and thinking from the parts of a text that comes in pieces of `cuts` characters."""
    stream, place = AnswerStream(characters, **how), 0
    marks, calls = how.get("marks"), how.get("calls")
    parts = []
    for cut in [*cuts, len(raw)]:
        parts.append(stream.push([ord(character) for character in raw[place : place + cut]]))
        place += cut
    thinking, text = (None, raw) if marks is None else marks.split(raw, begun=how["begun"])
    found: list[Any] = []
    if calls is not None:
        try:
            text, found = split_calls(text, calls)
        except ValueError:
            assert "<tool_call>" not in "".join(part[0] for part in parts)
    parts.append(stream.finish(text, thinking, has_calls=bool(found)))
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(st.lists(st.sampled_from(PIECES), max_size=7), CUTS, st.booleans())
def test_parts_joined_are_thinking_and_text(pieces: list[str], cuts: list[int], begun: bool) -> None:
    marks, raw = Reasoning(), "".join(pieces)
    got = joined_parts(raw, cuts, marks=marks, begun=begun)
    thinking, text = marks.split(raw, begun=begun)
    if begun or raw.lstrip().startswith(marks.start):
        assert got == (text, thinking or "")
    else:  # only its end has told that it was thinking, so that some of it has been sent as text
        assert got[0] + got[1] in (raw, raw.replace(marks.end, "", 1))


def test_a_stop_string_before_the_minimum_length_holds_no_text_back() -> None:
    stream = AnswerStream(characters, StopStrings(["."], characters, min_new_tokens=3))
    assert "".join(stream.push([ord(one)])[0] for one in "a.bc.d") == "a.bc"


def test_a_stop_string_in_the_thinking_ends_no_streamed_text() -> None:
    answer_start = partial(Reasoning().answer_start, begun=True)
    stream = AnswerStream(characters, StopStrings(["."], characters, answer_start=answer_start))
    assert "".join(stream.push([ord(one)])[0] for one in "a.b</think>so. No") == "a.b</think>so"


@example(["yes ", "<tool_call>", PIECES[3], "</tool_call>", "yes "], [1] * 60, None)
@example([" \n", "</think>", "yes ", "<tool_call>", PIECES[3]], [1] * 60, Reasoning())
@given(st.lists(st.sampled_from(PIECES), max_size=7), CUTS, st.sampled_from([None, Reasoning()]))
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_calls_are_no_part_of_a_streamed_text(
    form: ToolFormat, pieces: list[str], cuts: list[int], marks: Reasoning | None
) -> None:
    raw = "".join(pieces)
    thinking, text = (None, raw) if marks is None else marks.split(raw, begun=False)
    try:
        text, calls = split_calls(text, form)
    except ValueError:
        calls = []
    got = joined_parts(raw, cuts, calls=form, marks=marks, begun=False)
    if marks is None:
        assert (got[0].strip() if calls else got[0], got[1]) == (text, "")
    if form == "hermes":  # behind thinking without a start delimiter, a Llama call is sent as text too
        assert (got[1] + got[0]).split() == f"{thinking or ''}{text}".split()
