"""Prompts and answers of a `Generator`, and answers as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.types import FinishReason
from actors.tool_calls import ToolCall

Column = NDArray[Any]


@dataclass(frozen=True)
class Prompt:
    """A row to answer. Its own sampling, choices and output_format replace the Generator's."""

    ids: Sequence[int]
    source: str  # name of the row's file; with `row` and the seed it determines the row's random numbers
    row: int  # number of the row in `source`
    error: str | None = None  # why the row cannot be answered
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[str] | None = None
    output_format: OutputFormat | None = None
    tools: bool = False  # whether the prompt offers tools, so that its answers may call them


@dataclass(frozen=True)
class Answer:
    """One answer to a row. A row that cannot be answered has a single answer, an error without text."""

    row: int  # index of its prompt in the list of prompts
    sample_index: int  # number of the answer among the `n` answers to its prompt
    generated_text: str | None
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    mean_depth: float | None  # layers a decode step; None where there was no decode step
    error: str | None  # why there is no text, or why it is not whole in the form that was asked for
    token_ids: list[int] | None
    cumulative_logprob: float | None
    logprobs: list[dict[str, Any]] | None  # one for each token, as in `TokenLogprob.to_dict`
    choice_probability: float | None
    reasoning: str | None = None  # the thinking before the text
    tool_calls: list[ToolCall] | None = None  # not in the text; None without tools, or if they cannot be read


def error_answer(row: int, prompt_tokens: int, error: str) -> Answer:
    """Return the single answer of a row that cannot be answered."""
    return Answer(row, 0, None, str(FinishReason.ERROR), prompt_tokens, 0, None, error, None, None, None, None)


def as_column(values: Sequence[Any]) -> Column:
    """Return values of an input column as an array [rows]; lists and mappings become Python objects in it."""
    if isinstance(values, np.ndarray):
        return values
    if any(isinstance(value, list | tuple | Mapping | np.ndarray) for value in values):
        return object_column(values)
    return np.asarray(values)


def object_column(values: Sequence[Any]) -> Column:
    """Return an array [rows] of Python objects."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # a slice assignment would spread lists of one length over columns
        column[row] = value
    return column


def answer_columns(answers: Sequence[Answer], optional: Sequence[str]) -> dict[str, Column]:
    """Return the answers' columns. None means a missing number, as in the output of a job.

    optional: names of the optional fields to include.
    """
    columns: dict[str, Column] = {}
    for name in ("sample_index", "prompt_tokens", "generated_tokens"):
        columns[name] = np.array([getattr(answer, name) for answer in answers], dtype=np.int64)
    for name in ("generated_text", "finish_reason", "error", "mean_depth", *optional):
        values = [getattr(answer, name) for answer in answers]
        columns[name] = object_column([value or [] for value in values] if name == "logprobs" else values)
    return columns
