"""Rows on their way through a `Generator`: prompts in, answers out, and answers as columns."""

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
    """A row to answer.

    Args:
        ids: Token ids of the prompt.
        source: Name of the row's file; with `row` and the seed it determines the row's random numbers.
        row: Number of the row in `source`.
        error: Why the row cannot be answered.
        sampling: Sampling parameters of this row, on top of the Generator's.
        choices: Labels of this row, in place of the Generator's.
        output_format: Form of this row's answers, in place of the Generator's.
        tools: Whether the prompt offers tools, so that its answers may call them.
    """

    ids: Sequence[int]
    source: str
    row: int
    error: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[str] | None = None
    output_format: OutputFormat | None = None
    tools: bool = False


@dataclass(frozen=True)
class Answer:
    """One answer to a row. A row that cannot be answered has a single answer, an error without text.

    Args:
        row: Index of its prompt in the list of prompts.
        sample_index: Number of the answer among the `n` answers to its prompt.
        mean_depth: Layers a decode step; None where there was no decode step.
        reasoning: The thinking before the text, for a Generator with `reasoning`; None without any.
        error: Why there is no text, or why the text is not whole in the form that was asked for.
        cumulative_logprob: See `Completion`, as for `choice_probability`.
        logprobs: Of each token, as in `TokenLogprob.to_dict`; None without.
        tool_calls: Calls of the tools that the prompt offers, which the text does not hold; None without tools, or for
            calls that cannot be read.
    """

    row: int
    sample_index: int
    generated_text: str | None
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    mean_depth: float | None
    error: str | None
    token_ids: list[int] | None
    cumulative_logprob: float | None
    logprobs: list[dict[str, Any]] | None
    choice_probability: float | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


def error_answer(row: int, prompt_tokens: int, error: str) -> Answer:
    """The single answer of a row that cannot be answered."""
    return Answer(row, 0, None, str(FinishReason.ERROR), prompt_tokens, 0, None, error, None, None, None, None)


def as_column(values: Sequence[Any]) -> Column:
    """Values of an input column as an array [rows]; lists and mappings, of any length, become its objects."""
    if isinstance(values, np.ndarray):
        return values
    if any(isinstance(value, list | tuple | Mapping | np.ndarray) for value in values):
        return object_column(values)
    return np.asarray(values)


def object_column(values: Sequence[Any]) -> Column:
    """An array [rows] of Python objects."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # a slice assignment would make columns of lists of one length
        column[row] = value
    return column


def answer_columns(
    answers: Sequence[Answer],
    *,
    choices: bool,
    logprobs: bool,
    reasoning: bool = False,
    cumulative_logprob: bool = False,
) -> dict[str, Column]:
    """The answers' columns; None stands for a missing number, as in the output of a job.

    Args:
        choices: Whether to add `choice_probability`.
        logprobs: Whether to add `logprobs`.
        reasoning: Whether to add `reasoning`.
        cumulative_logprob: Whether to add `cumulative_logprob`.
    """
    columns: dict[str, Column] = {}
    for name in ("sample_index", "prompt_tokens", "generated_tokens"):
        columns[name] = np.array([getattr(answer, name) for answer in answers], dtype=np.int64)
    nullable = ["generated_text", "finish_reason", "error", "mean_depth"]
    nullable += (
        ["cumulative_logprob"] * cumulative_logprob + ["choice_probability"] * choices + ["reasoning"] * reasoning
    )
    for name in nullable:
        columns[name] = object_column([getattr(answer, name) for answer in answers])
    if logprobs:
        columns["logprobs"] = object_column([answer.logprobs or [] for answer in answers])
    return columns
