"""Defines prompts and answers of a `Generator`. Converts answers to columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.types import FinishReason

Column = NDArray[Any]
# name -> type of the answer columns in each job's output, and in each batch that `Generator` returns
ANSWER_TYPES = {
    "sample_index": pa.int32(),
    "generated_text": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int32(),
    "generated_tokens": pa.int32(),
    "mean_depth": pa.float64(),
    "error": pa.string(),
}
_TOKEN_LOGPROB = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float64())]
_TOKEN_LOGPROBS = pa.struct([*_TOKEN_LOGPROB, ("top", pa.list_(pa.struct(_TOKEN_LOGPROB)))])
OPTIONAL_TYPES = {  # name -> type of the columns that only some jobs ask for
    "token_ids": pa.list_(pa.int32()),
    "cumulative_logprob": pa.float64(),
    "logprobs": pa.list_(_TOKEN_LOGPROBS),
    "choice_probability": pa.float64(),
    "reasoning": pa.string(),
}


@dataclass(frozen=True)
class Prompt:
    """A row to answer. `sampling`, `choices` and `output_format`, if set, override those of the `Generator`."""

    ids: Sequence[int]
    source: str  # name of the row's file. The seed, `source` and `row` determine the row's random numbers
    row: int  # number of the row in `source`
    error: str | None = None  # why the row cannot be answered
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[str] | None = None
    output_format: OutputFormat | None = None


@dataclass(frozen=True)
class Answer:
    """One answer to a row. A row that cannot be answered has a single Answer, with an error and without text."""

    row: int  # index of the prompt in the list of prompts
    sample_index: int  # number of this answer among the `n` answers to the prompt, from 0
    generated_text: str | None
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    mean_depth: float | None  # mean number of layers per decode step; None if there was no decode step
    error: str | None  # why there is no text, or why the text does not complete the requested format
    token_ids: list[int] | None
    cumulative_logprob: float | None  # sum of the log-probabilities of all tokens, in nats
    logprobs: list[dict[str, Any]] | None  # one entry per token, see `TokenLogprob.to_dict`
    choice_probability: float | None  # see `Completion`
    reasoning: str | None = None  # the model's thinking, which came before the text


def error_answer(row: int, prompt_tokens: int, error: str) -> Answer:
    """Return the single answer of a row that cannot be answered."""
    return Answer(row, 0, None, str(FinishReason.ERROR), prompt_tokens, 0, None, error, None, None, None, None)


def as_column(values: Sequence[Any]) -> Column:
    """Convert a column's values to an array [rows]. If any value is a list or a mapping, the dtype is object."""
    if isinstance(values, np.ndarray):
        return values
    if any(isinstance(value, list | tuple | Mapping | np.ndarray) for value in values):
        return object_column(values)
    return np.asarray(values)


def object_column(values: Sequence[Any]) -> Column:
    """Convert values to an array [rows] with dtype object."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # one by one: `column[:] = values` would split lists of equal length
        column[row] = value
    return column


def answer_types(optional: Sequence[str]) -> dict[str, pa.DataType]:
    """Return name -> type of the answer columns. optional: names from `OPTIONAL_TYPES` to include."""
    return {**ANSWER_TYPES, **{name: OPTIONAL_TYPES[name] for name in optional}}


def answer_columns(answers: Sequence[Answer], optional: Sequence[str]) -> dict[str, pa.Array]:
    """Convert answers to columns: name -> values. optional: see `answer_types`."""
    types = answer_types(optional)
    return {name: pa.array([getattr(answer, name) for answer in answers], kind) for name, kind in types.items()}
