"""The CPU stage: a shard's rows -> prompts as token ids, each row checked on its own.

A row that cannot be answered keeps its place, with the reason in `error`; it never costs another row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import numpy as np
import pyarrow as pa

from actors.engine.loading import load_tokenizer
from pipeline.source import from_ipc, to_ipc

PROMPT_IDS, ERROR = "__prompt_ids", "__error"  # no input column is called so: checked when the job is planned
# what an expression over a row's values may raise
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class PromptSpec:
    """How a row becomes a prompt.

    column or template: one of them. context_length: tokens. too_long: ``error`` or ``truncate_left``; a
    truncated prompt leaves room for `max_new_tokens`.
    """

    checkpoint: str
    column: str | None
    template: str | None
    context_length: int
    max_new_tokens: int
    too_long: str


def compile_template(text: str) -> jinja2.Template:
    """A sandboxed template that refuses undefined columns. ValueError if it does not parse."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None


def template_columns(text: str) -> list[str]:
    """Names that a template reads, sorted. ValueError if it does not parse."""
    compile_template(text)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    return sorted(jinja2.meta.find_undeclared_variables(environment.parse(text)))


def prepare(batch: Mapping[str, Any], spec: PromptSpec) -> dict[str, Any]:
    """Ray Data stage over whole shards: adds prompt ids and errors to their rows, and the seconds it took."""
    began = time.perf_counter()
    tables = [prepare_table(from_ipc(rows), spec) for rows in batch["rows"]]
    seconds = (time.perf_counter() - began) / max(len(tables), 1)
    return {
        **{name: batch[name] for name in ("shard", "url", "first_row")},
        "rows": _binary([to_ipc(table) for table in tables]),
        "prepare_seconds": np.full(len(tables), seconds),
    }


def _binary(values: Sequence[bytes]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def prepare_table(table: pa.Table, spec: PromptSpec) -> pa.Table:
    """The shard's table with columns of prompt ids (empty for a bad row) and errors (null for a good one)."""
    prompts, errors = _render(table, spec)
    ids: list[list[int]] = [[] for _ in prompts]
    good = [row for row, error in enumerate(errors) if error is None]
    if good:
        tokenizer = _tokenizer(spec.checkpoint)
        encoded = tokenizer([prompts[row] for row in good], verbose=False)["input_ids"]
        for row, tokens in zip(good, encoded, strict=True):
            ids[row], errors[row] = _fit(tokens, spec)
    return table.append_column(PROMPT_IDS, pa.array(ids, pa.list_(pa.int32()))).append_column(
        ERROR, pa.array(errors, pa.string())
    )


@lru_cache(maxsize=2)
def _tokenizer(checkpoint: str) -> Callable[..., Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Ray runs several of these side by side
    return load_tokenizer(checkpoint)


def _render(table: pa.Table, spec: PromptSpec) -> tuple[list[str], list[str | None]]:
    """A prompt and an error for each row, one of them empty."""
    template = None if spec.template is None else compile_template(spec.template)
    columns = [str(spec.column)] if spec.template is None else template_columns(spec.template)
    prompts: list[str] = []
    errors: list[str | None] = []
    for row in _rows(table, columns):
        prompt, error = "", None
        if isinstance(row, UnicodeDecodeError):
            error = f"not UTF-8: {row}"
        elif template is None:
            prompt = row[spec.column]
        else:
            try:
                prompt = template.render(row)
            except _TEMPLATE_ERRORS as problem:
                error = f"template: {type(problem).__name__}: {' '.join(str(problem).split())}"
        if error is None and not (prompt and prompt.strip()):
            prompt, error = "", "prompt is null" if prompt is None else "prompt is empty"
        prompts.append(prompt)
        errors.append(error)
    return prompts, errors


def _rows(table: pa.Table, columns: Sequence[str]) -> list[Any]:
    """Rows as dictionaries; in place of one whose text is not UTF-8, which Arrow does not check, its error."""
    picked = table.select(list(columns))
    try:
        whole: list[Any] = picked.to_pylist()
        return whole
    except UnicodeDecodeError:
        found: list[Any] = []
    for row in range(picked.num_rows):
        try:
            found += picked.slice(row, 1).to_pylist()
        except UnicodeDecodeError as error:
            found.append(error)
    return found


def _fit(tokens: list[int], spec: PromptSpec) -> tuple[list[int], str | None]:
    if not tokens:
        return [], "prompt has no tokens"
    if len(tokens) < spec.context_length:
        return tokens, None
    if spec.too_long == "error":
        return [], f"prompt of {len(tokens)} tokens leaves no room in a context of {spec.context_length}"
    return tokens[-(spec.context_length - spec.max_new_tokens) :], None
