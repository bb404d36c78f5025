"""Parts of a text, joined, are the text, whatever the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.loading import load_tokenizer
from actors.engine.stopping import StopStrings
from actors.serving.texts import TextStream


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
