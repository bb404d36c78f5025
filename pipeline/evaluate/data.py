"""Rows to evaluate on: prompts and references from Parquet, checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.engine.errors import UserError
from pipeline.config.evaluate import EvalDataConfig
from pipeline.messages import is_unicode
from pipeline.storage.parquet import read_columns


@dataclass(frozen=True)
class EvalRow:
    """prompt: text or token ids. references: none where the data has none. path, number: its file and place there."""

    prompt: str | list[int]
    references: tuple[str, ...]
    path: str
    number: int

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.path}: row {self.number}"


def read_rows(data: EvalDataConfig, choices: Sequence[str] | None) -> list[EvalRow]:
    """The rows, at most `data.limit`. ValueError of one line names file, column and row of what cannot be scored."""
    known = None if choices is None else {normal(label) for label in choices}
    rows: list[EvalRow] = []
    for path in data.path:
        prompts, given = _columns(path, data, None if data.limit is None else data.limit - len(rows))
        for number, (prompt, one) in enumerate(zip(prompts, given, strict=True)):
            place = f"{path}: row {number}"
            references = tuple(one) if isinstance(one, list) else (one,)
            if not _is_prompt(prompt):
                raise UserError(f"{place}: column {data.prompt!r} must hold text or token ids, none of them empty")
            if data.references is not None and not (references and all(_is_text(each) for each in references)):
                raise UserError(
                    f"{place} needs a prompt and at least one reference; column {data.references!r} must hold text"
                )
            if known is not None and data.references is not None:
                odd = [label for label in references if normal(label) not in known]
                if odd:
                    raise UserError(f"{place}: label {odd[0]!r} is not one of choices; add it, or leave the row out")
            rows.append(EvalRow(prompt, references if data.references is not None else (), path, number))
            if len(rows) == data.limit:
                break
        if len(rows) == data.limit:
            break
    if len(rows) < 2:
        raise UserError(
            f"{data.path[0]}: {len(rows) or 'no'} row{'s' * (len(rows) != 1)} to score; intervals are over rows: "
            "give at least 2"
        )
    return rows


def normal(text: str) -> str:
    """A text as exact match sees it: case and outer space ignored."""
    return text.strip().lower()


def _columns(path: str, data: EvalDataConfig, limit: int | None) -> tuple[list[Any], list[Any]]:
    if data.references is None:
        [prompts] = read_columns(path, (data.prompt,), limit)
        return prompts, [()] * len(prompts)
    try:
        prompts, references = read_columns(path, (data.prompt, data.references), limit)
    except ValueError as error:
        if f"no column {data.references!r}" in str(error):
            raise UserError(
                f"{error}; data.references: null measures agreement with full depth, without references"
            ) from None
        raise
    return prompts, references


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(token, int) and token >= 0 for token in value)
    return _is_text(value) and bool(value.strip())
