"""Stop strings over tokens that cut text where they like."""

from __future__ import annotations

from dataclasses import replace

from engine_cases import answer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LAYERS

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.sampling.stopping import StopStrings
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import FinishReason, Request, SamplingParams

# token -> bytes; 0 is special and decodes to nothing, 8 to 11 are the four bytes of one character
PIECES = [b"", b"a", b"b", b"ab", b"ba", b"END", b"xEN", b"Dy", b"\xf0", b"\x9f", b"\x98", b"\x80", b" ", b"\n\n", b"E"]


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


STRINGS = st.lists(st.sampled_from(["END", "ab", "aba", "\n\n", "\U0001f600", "E", "y E"]), min_size=1, max_size=3)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=40), STRINGS)
def test_the_first_token_that_completes_a_string_ends_the_answer(tokens: list[int], strings: list[str]) -> None:
    """Against the whole text looked through after every token."""
    stops = StopStrings(strings, decode, {0})
    for count in range(1, len(tokens) + 1):
        begun = tokens[:count]
        text = decode(begun)
        inside = [text.find(one) for one in strings if one in text]
        assert stops.ended(begun) == bool(inside)
        if inside:
            assert stops.cut(begun) == text[: min(inside)]
            break
        assert stops.cut(begun) == text


def test_a_string_that_ends_in_white_space_decodes_each_kind_of_token_once() -> None:
    asked: list[list[int]] = []

    def counted(tokens: list[int]) -> str:
        asked.append(tokens)
        return decode(tokens)

    stops = StopStrings(["\n"], counted, {0})
    tokens = [1, 2, 3, 4] * 20
    assert not any(stops.ended(tokens[:count]) for count in range(1, len(tokens) + 1))
    assert len(asked) == 4
    assert stops.ended([*tokens, 13])


def test_white_space_in_front_of_a_token_ends_a_string_although_a_text_drops_its_first_space() -> None:
    pieces = [" a", " b", "c"]
    stops = StopStrings(["a "], lambda tokens: "".join(pieces[token] for token in tokens).removeprefix(" "))
    assert not stops.ended([1, 0]) and not stops.ended([1, 0, 2])
    assert stops.ended([1, 0, 1]) and stops.cut([1, 0, 1]) == "b "


def test_a_string_may_span_tokens_or_end_inside_one() -> None:
    stops = StopStrings(["END"], decode, {0})
    assert not stops.ended([1, 6])
    assert stops.ended([1, 6, 7]) and stops.cut([1, 6, 7]) == "ax"
    assert stops.ended([1, 6, 0, 0, 0, 0, 0, 0, 0, 7])


def test_a_string_within_the_first_tokens_does_not_count() -> None:
    stops = StopStrings(["ab"], decode, {0}, min_new_tokens=3)
    assert not stops.ended([1, 2]) and not stops.ended([1, 2, 12])
    assert not stops.ended([12, 1, 2])
    assert stops.ended([12, 12, 1, 2]) and stops.cut([12, 12, 1, 2]) == "  "
    assert stops.ended([1, 2, 12, 3]) and stops.cut([1, 2, 12, 3]) == "ab "
    stops = StopStrings(["\U0001f600"], decode, {0}, min_new_tokens=3)
    assert stops.ended([8, 9, 10, 11]) and stops.cut([8, 9, 10, 11]) == ""


def test_the_engine_ends_a_row_at_its_string(llama: Decoder) -> None:
    engine = Engine(llama, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), set())

    def text(tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)

    rows = [Request([row], SamplingParams(max_new_tokens=12)) for row in range(3, 9)]
    whole = answer(engine, rows)
    strings = [text(list(one.token_ids[4:6])) for one in whole]
    stopped = [replace(row, ending=StopStrings([string], text)) for row, string in zip(rows, strings, strict=True)]
    for before, after in zip(whole, answer(engine, stopped), strict=True):
        pairs = [before.token_ids[place : place + 2] for place in range(5)]
        first = pairs.index(before.token_ids[4:6])
        assert after.token_ids == before.token_ids[: first + 2]
        assert after.finish_reason == FinishReason.STOP
