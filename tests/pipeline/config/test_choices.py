"""A set of labels is usable, or its row's error; a prompt leaves room for the longest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prompt_specs import spec_of

from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.prepare.prompt_spec import check_spec
from pipeline.prepare.prompts import CHOICES, ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.tokenizer import longest, tokenize_labels

LABELS = pa.list_(pa.string())


def prepared(checkpoint: Path, labels: list[Any], **changes: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Prompt ids, choices and errors."""
    prompts = changes.pop("prompts", ["hi"] * len(labels))
    table = pa.table({"prompt": prompts, "c": pa.array(labels, LABELS)})
    done = prepare_table(table, spec_of(checkpoint, own_choices="c", **changes))
    return done[PROMPT_IDS].to_pylist(), done[CHOICES].to_pylist(), done[ERROR].to_pylist()


def test_a_rows_labels_come_before_the_jobs(checkpoint: Path) -> None:
    _, labels, errors = prepared(checkpoint, [["yes", "yesterday"], None], choices=("a", "b"))
    assert labels == [["yes", "yesterday"], None] and errors == [None, None]


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        (None, "choices is null"),
        ([], "choices is empty"),
        (["a", ""], "choices: label 2 is empty"),
        ([" "], "choices: label 1 is empty"),
        (["a", None], "choices: label 2 is null"),
        (["a", "b", "a"], "choices: 'a' is repeated"),
        (["yes", " yes"], "choices: 'yes' and ' yes' have the same tokens"),
    ],
)
def test_labels_with_the_same_tokens_are_a_row_error(
    checkpoint: Path, labels: list[str | None] | None, error: str
) -> None:
    ids, found, errors = prepared(checkpoint, [["a", "b"], labels])
    assert errors == [None, error] and found == [["a", "b"], None] and ids[1] == []


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("a positive review", "no", "a negative review"), "'a positive review' and 'a negative review' begin alike"),
        (("b", "no, nothing of this kind"), "some are much longer"),
        (("a", "b"), ""),
        (("ab", "cde"), ""),
    ],
)
def test_labels_whose_probability_is_no_share_are_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, labels: tuple[str, ...], said: str
) -> None:
    """Only tokens at which labels part count: 0.70 where the share of all labels' probability was 0.04."""
    check_spec(spec_of(checkpoint, choices=labels))
    assert ("choice_probability" in caplog.text) is bool(said) and said in caplog.text


@pytest.mark.parametrize(
    "params", [{"stop": ("x",)}, {"stop_token_ids": (5,)}, {"min_new_tokens": 2}, {"ignore_eos": True}]
)
def test_settings_that_end_a_label_early_are_refused(checkpoint: Path, params: dict[str, Any]) -> None:
    (name,) = params
    error = f"choices cannot be combined with sampling.{name}: the label alone ends the answer"
    assert prepared(checkpoint, [["a"]], params=SamplingParams(**params))[2] == [error]
    table = pa.table({"prompt": ["hi"] * 2, "own": [params, dict.fromkeys(params)]})
    spec = spec_of(checkpoint, choices=("a",), sampling="own")
    assert prepare_table(table, spec)[ERROR].to_pylist() == [error, None]


def test_a_prompt_leaves_room_for_the_longest_label(checkpoint: Path) -> None:
    label = "a b c d e f"
    size = len(load_tokenizer(checkpoint)(label, add_special_tokens=False)["input_ids"])
    prompts = [("a " * (64 - size - 1 - spare)).strip() for spare in (2, 1)]
    lengths = [len(load_tokenizer(checkpoint)(prompt)["input_ids"]) for prompt in prompts]
    assert lengths == [64 - size - 1, 64 - size]
    ids, _, errors = prepared(checkpoint, [[label, "a"]] * 2, prompts=prompts)
    no_room = f"prompt of {lengths[1]} tokens leaves no room for a label of {size} tokens in a context of 64"
    assert errors == [None, no_room]
    ids, _, errors = prepared(checkpoint, [[label, "a"], ["a"]], prompts=[prompts[1]] * 2, too_long="truncate_left")
    assert errors == [None, None] and [len(one) for one in ids] == [64 - size - 1, lengths[1]]
    _, _, errors = prepared(checkpoint, [["a " * 100]], too_long="truncate_left")
    assert errors[0] is not None and errors[0].endswith("new tokens leave no room in a context of 64")


def test_labels_of_the_job_are_checked_before_it_runs(checkpoint: Path) -> None:
    def check(*labels: str) -> None:
        check_spec(spec_of(checkpoint, choices=labels, too_long="truncate_left"))

    check("yes", "yesterday")
    check_spec(spec_of(checkpoint, own_choices="labels", too_long="truncate_left"))
    for labels, said in (
        (("yes", " yes"), "have the same tokens"),
        (("\ud800",), "has no tokens"),
        (("a " * 100,), "leaves prompts no room in a context of 64"),
    ):
        with pytest.raises(ValueError, match=said):
            check(*labels)


def test_labels_have_no_special_tokens(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenize_labels(tokenizer, ["yes", "no", "yes"])
    assert list(ids) == ["yes", "no"]
    assert not {token for one in ids.values() for token in one} & set(tokenizer.all_special_ids)
    assert longest(["yes", "no"], ids) == max(len(one) for one in ids.values())


def test_more_new_tokens_than_the_context_holds_are_a_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tokens in (63, 64):
        check_spec(spec_of(checkpoint, params=SamplingParams(max_new_tokens=tokens)))
        assert ("sampling.max_new_tokens = 64" in caplog.text) == (tokens == 64)
