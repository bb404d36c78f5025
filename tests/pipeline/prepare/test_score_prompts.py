"""Rows to score: tokens of prompts and continuations, as the Generator's own, and the errors of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.generator import Generator
from pipeline.prepare.chat import Chat
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import CONTINUATIONS, ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of

CONTEXT = 64


def prepared(checkpoint: Path, prompts: list[Any], ways: list[Any], **changes: Any) -> list[tuple[Any, Any, Any]]:
    values: dict[str, Any] = {"column": "prompt", "continuations": "ways", **changes}
    spec = PromptSpec(str(checkpoint), 300, CONTEXT, **values)
    done = prepare_table(pa.table({"prompt": prompts, "ways": ways}), spec)
    return list(zip(*(done[name].to_pylist() for name in (PROMPT_IDS, CONTINUATIONS, ERROR)), strict=True))


def test_tokens_are_the_generators_own(checkpoint: Path) -> None:
    builder = Generator(str(checkpoint), dtype="float32", device="cpu").builder
    prompts = ["name[Zizzi]", "", "food ", "The Eagle serves", "area"]
    ways = [[" is cheap", "zi"], ["whole text"], ["French", "pub"], [" "], ["x"]]
    for (ids, continuations, error), prompt, texts in zip(
        prepared(checkpoint, prompts, ways), prompts, ways, strict=True
    ):
        one = builder.prompt(prompt, texts)
        assert error is None and one.error is None
        assert (ids, continuations) == (one.ids, one.continuations)
    by_ids = prepared(checkpoint, [[7, 8, 9]], ["pub"])
    assert by_ids == [([7, 8, 9], [tokenizer_of(str(checkpoint))("pub", add_special_tokens=False)["input_ids"]], None)]
    one = builder.prompt([7, 8, 9], "pub")
    assert (one.ids, one.continuations) == by_ids[0][:2]


def test_a_chat_is_scored_behind_its_template(chat_checkpoint: Path) -> None:
    [(ids, ways, error)] = prepared(chat_checkpoint, ["cheap?"], [["yes", "no"]], chat=Chat())
    tokenizer = tokenizer_of(str(chat_checkpoint))
    assert error is None
    for text, way in zip(("yes", "no"), ways, strict=True):
        whole = tokenizer(f"<s>[user]cheap?</s>[assistant]{text}", add_special_tokens=False)["input_ids"]
        assert [*ids, *way] == whole


def test_rows_that_cannot_be_scored_have_errors_and_cost_no_other_row(checkpoint: Path) -> None:
    long = "name " * 80
    cases: list[tuple[Any, Any, str | None]] = [
        (None, ["a"], "prompt is null"),
        ("a", None, "continuations is null or empty"),
        ("a", [], "continuations is null or empty"),
        ("a", ["b", ""], "continuation 2 is empty; it must be text"),
        ("a", ["b", None], "continuation 2 is null; it must be text"),
        (long, ["b"], "prompt of 83 tokens and continuation of 2 exceed the context of 64"),
        ("a", ["b", long], "exceed the context of 64"),
        ("a", ["b"], None),
    ]
    found = prepared(checkpoint, *(list(column) for column in zip(*[case[:2] for case in cases], strict=True)))
    for (ids, ways, error), (*_, expected) in zip(found, cases, strict=True):
        if expected is None:
            assert error is None and ids and ways
        else:
            assert expected in error and ids == [] and ways is None


def test_a_prompt_is_cut_on_the_left_to_what_its_longest_continuation_leaves(checkpoint: Path) -> None:
    long, ways = "food " * 80, [" cheap", " cheap food near the river"]
    _, continuations, _ = prepared(checkpoint, ["food"], [ways])[0]
    [(ids, cut, error)] = prepared(checkpoint, [long], [ways], too_long="truncate_left")
    longest = max(map(len, continuations))
    assert error is None and [len(one) for one in cut] == [len(one) for one in continuations]
    assert len(ids) == CONTEXT - (longest - 1)  # the last token of a continuation is never an input
    [(ids, _, _)] = prepared(checkpoint, [[3] * CONTEXT], [["a"]])
    assert len(ids) == CONTEXT
    [(_, _, error)] = prepared(checkpoint, ["a"], ["food " * 80], too_long="truncate_left")
    assert "exceed the context" in error


@pytest.mark.parametrize("too_long", ["error", "truncate_left"])
def test_a_huge_continuation_is_refused_before_it_is_tokenized(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, too_long: str
) -> None:
    monkeypatch.setattr("pipeline.prepare.prompt_row.fewest_tokens", lambda *_: 65)
    [(_, _, error)] = prepared(checkpoint, ["a"], [["b"]], too_long=too_long)
    assert error == "continuation 1 of at least 65 tokens exceeds the context of 64"
