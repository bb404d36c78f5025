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


@dataclass(frozen=True)
class PromptSpec:
    """How a row becomes a prompt.

    column or template: one of them. context_length: tokens. too_long: ``error`` or ``truncate_left``; a
    truncated prompt keeps room for `max_new_tokens`, or for one token if that is all there is.
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
    if spec.template is None:
        assert spec.column is not None
        values = table[spec.column].to_pylist()
        errors: list[str | None] = [None] * len(values)
    else:
        template = compile_template(spec.template)
        values, errors = [], []
        for row in table.select(template_columns(spec.template)).to_pylist():
            try:
                values.append(template.render(row))
                errors.append(None)
            except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
                values.append("")
                errors.append(f"template: {type(error).__name__}: {' '.join(str(error).split())}")
    for row, value in enumerate(values):
        if errors[row] is None and value is None:
            errors[row] = "prompt is null"
        elif errors[row] is None and not value.strip():
            errors[row] = "prompt is empty"
    return values, errors


def _fit(tokens: list[int], spec: PromptSpec) -> tuple[list[int], str | None]:
    if not tokens:
        return [], "prompt has no tokens"
    if len(tokens) < spec.context_length:
        return tokens, None
    if spec.too_long == "error":
        return [], f"prompt of {len(tokens)} tokens leaves no room in a context of {spec.context_length}"
    room = max(1, spec.context_length - spec.max_new_tokens)
    return tokens[-room:], None
