"""Rows whose continuations a `Generator` has scored, and their scores as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.answers import Column, Prompt, object_column
from actors.engine.errors import UserError
from actors.engine.scoring.types import ContinuationScore, ScoreRequest

if TYPE_CHECKING:
    from actors.engine.protocol import EngineProtocol

SCORES = ("continuation_tokens", "cumulative_logprob", "token_logprobs", "perplexity", "is_greedy", "mean_depth")


@dataclass(frozen=True)
class ScoredRow:
    """Scores of a row's continuations.

    Args:
        row: Index of its prompt in the list of prompts.
        prompt_tokens: Of its prompt.
        scores: Of each continuation; none if there is an error.
        mean_depths: Layers run for a token of each continuation that was an input; None where none was.
        error: Why there are no scores.
    """

    row: int
    prompt_tokens: int
    scores: Sequence[ContinuationScore]
    mean_depths: Sequence[float | None]
    error: str | None = None

    def values(self, *, many: bool) -> dict[str, Any]:
        """A value for each of `SCORES` and `token_ids`: of the only continuation, or lists of those of all.

        None for a row with an error.
        """
        names = (*SCORES, "token_ids")
        if self.error is not None:
            return dict.fromkeys(names)
        of_each = [
            (
                len(score.tokens),
                score.cumulative,
                [token.logprob for token in score.tokens],
                score.perplexity,
                score.is_greedy,
                depth,
                [token.token for token in score.tokens],
            )
            for score, depth in zip(self.scores, self.mean_depths, strict=True)
        ]
        if many:
            return {name: list(values) for name, values in zip(names, zip(*of_each, strict=True), strict=True)}
        return dict(zip(names, of_each[0], strict=True))


def score_columns(rows: Sequence[ScoredRow], many: Sequence[bool]) -> dict[str, Column]:
    """Columns of `SCORES`, `prompt_tokens` and `error`. many: whether a row's values are lists."""
    values = [row.values(many=lists) for row, lists in zip(rows, many, strict=True)]
    return {
        "prompt_tokens": np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        **{name: object_column([value[name] for value in values]) for name in SCORES},
        "error": object_column([row.error for row in rows]),
    }


def score_rows(
    engine: EngineProtocol,
    prompts: Sequence[Prompt],
    *,
    budget_bytes: int,
    max_rows: int,
    prefix: Sequence[int],
    on_batch: Callable[[Sequence[int]], None] | None,
) -> list[ScoredRow]:
    """`score_continuations` of the rows that can be scored; the others get an error.

    on_batch: called with numbers of rows, and with no rows at the end.
    """
    from actors.engine.scoring.score import check_request, score_continuations

    asked: list[ScoreRequest] = []
    owners: list[int] = []  # the row of each request
    rows: dict[int, ScoredRow] = {}
    for row, prompt in enumerate(prompts):
        request = ScoreRequest(prompt.ids, prompt.continuations)
        try:
            if prompt.error is not None:
                raise UserError(prompt.error)
            check_request(engine, request, budget_bytes)
        except UserError as error:
            rows[row] = ScoredRow(row, len(prompt.ids), (), (), str(error))
            continue
        asked.append(request)
        owners.append(row)

    def report(indices: Sequence[int]) -> None:
        if on_batch is not None:
            on_batch([owners[index] for index in indices])

    scores = score_continuations(
        engine, asked, budget_bytes=budget_bytes, max_rows=max_rows, prefix=prefix, on_batch=report
    )
    report(())
    for row, score in zip(owners, scores, strict=True):
        depths = [engine.schedule.mean_depth(len(one.tokens)) for one in score.continuations]
        rows[row] = ScoredRow(row, len(prompts[row].ids), score.continuations, depths, score.error)
    return [rows[row] for row in range(len(prompts))]
