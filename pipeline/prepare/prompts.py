"""Turns the rows of a shard into prompts of token ids.

Each row's text comes from a prompt column, a template or a chat. A row may have its own sampling parameters and labels.
The texts of all rows are tokenized in batches. A prompt that does not fit the context is refused or truncated. A row
that fails in any step keeps its place in the table and gets an error. Other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from actors.control_tokens import control_tokens
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError, flat
from actors.engine.types import SamplingParams, check_compatible
from actors.openai_requests import CompletionRequest
from pipeline.config.forms import check_labels
from pipeline.input import schema
from pipeline.messages import counted, is_unicode, printable
from pipeline.prepare.chat import checked_tools, read_messages, render_chat, without_nulls
from pipeline.prepare.prompt_spec import PromptSpec, read_names
from pipeline.prepare.row_settings import column_overrides, own_sampling, read_batch_row
from pipeline.prepare.templates import render
from pipeline.prepare.tokenizer import fewest_tokens, longest, tokenize, tokenize_labels, tokenizer_of

TRUNCATED_CHARACTERS = 2**23  # `too_long: truncate_left` keeps at most this many characters, from the prompt's end
# names of columns that `prepare_table` adds; planning refuses input columns with these names
PROMPT_IDS, ERROR = "__prompt_ids", schema.ERROR
# added columns with a row's own settings: sampling parameters (canonical JSON), labels, answer format
SAMPLING, CHOICES, FORM = "__sampling", "__choices", "__form"
CONTROL_TOKENS = "__control_tokens"  # added column: number of control tokens in the row's values that stay tokens
ADDED = {
    PROMPT_IDS: pa.list_(pa.int32()),
    ERROR: pa.string(),
    SAMPLING: pa.string(),
    CHOICES: pa.list_(pa.string()),
    FORM: pa.struct([("kind", pa.string()), ("text", pa.string())]),
    CONTROL_TOKENS: pa.int32(),
}
_NOT_PYTHON = (ValueError, OverflowError, LookupError)  # raised for Arrow values such as the year 300,000


@dataclass
class Draft:
    """A row that is being turned into a prompt. Once `error` is set, all further steps skip the row.

    Args:
        label_tokens: Number of tokens of the longest label, plus one for the end token; 0 for a row without labels.
        is_chat: Whether a chat template makes the prompt, including its special tokens.
        control_tokens: Number of control tokens in the row's values that stay tokens (`input.special_tokens: parse`).
        is_marked: Whether the prompt holds marked control tokens, which must become plain text (see `ControlTokens`).
    """

    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    sampling: str | None = None
    choices: list[str] | None = None
    form: OutputFormat | None = None
    label_tokens: int = 0
    is_chat: bool = False
    control_tokens: int = 0
    is_marked: bool = False
    error: str | None = None


def prepare_table(table: pa.Table, spec: PromptSpec) -> pa.Table:
    """Add the columns in `ADDED` to a shard's table. A row that fails gets an error and no token ids."""
    table, errors = schema.split_errors(table)
    rows = [Draft(error=error) for error in errors]
    for row, values in zip(rows, _python_rows(table, read_names(spec.input)), strict=True):
        _attempt(row, _read, values, spec)
    labels = [*spec.choices, *(label for row in rows if row.error is None for label in row.choices or ())]
    label_ids = tokenize_labels(tokenizer_of(spec.checkpoint), labels) if labels else {}
    label_tokens = longest(spec.choices, label_ids) + 1 if spec.choices else 0
    for row in rows:
        _attempt(row, _bound, spec, label_ids, label_tokens)
        _attempt(row, _encode_marked, spec)
    for is_chat in (False, True):  # the tokenizer adds special tokens, except in chats, whose template writes them
        texts = [row for row in rows if row.error is None and row.is_chat == is_chat and isinstance(row.prompt, str)]
        encoded = tokenize(spec.checkpoint, [str(row.prompt) for row in texts], special_tokens=not is_chat)
        for row, tokens in zip(texts, encoded, strict=True):
            row.prompt = tokens
    for row in rows:
        _attempt(row, _fit, spec)
    return _with_added(table, rows)


def error_table(table: pa.Table, errors: Sequence[str]) -> pa.Table:
    """Return the table that `prepare_table` returns if every row fails. errors: the error of each row."""
    return _with_added(schema.split_errors(table)[0], [Draft(error=error) for error in errors])


def _with_added(table: pa.Table, rows: Sequence[Draft]) -> pa.Table:
    rows = [row if row.error is None else Draft(prompt=[], error=row.error) for row in rows]
    added = {
        PROMPT_IDS: [row.prompt for row in rows],
        ERROR: [None if row.error is None else row.error.encode(errors="replace").decode() for row in rows],
        SAMPLING: [row.sampling for row in rows],
        CHOICES: [row.choices for row in rows],
        FORM: [None if row.form is None else asdict(row.form) for row in rows],
        CONTROL_TOKENS: [row.control_tokens or None for row in rows],
    }
    for name, kind in ADDED.items():
        table = table.append_column(name, pa.array(added[name], kind))
    return table


def _attempt(row: Draft, step: Callable[..., None], *arguments: Any) -> None:
    """Call `step` with `row` unless the row has an error. A ValueError becomes the row's error."""
    if row.error is None:
        try:
            step(row, *arguments)
        except ValueError as error:
            row.error = str(error)


def _python_rows(table: pa.Table, columns: Sequence[str]) -> list[Any]:
    """Return each row as a dictionary, or as an exception if Python cannot hold one of its values.

    Such values are, for example, a date in the year 300,000, or text that is not UTF-8, which Arrow does not check.
    """
    selected, rows = table.select(list(columns)), list[Any]()
    for number in range(table.num_rows):
        try:
            rows += selected.slice(number, 1).to_pylist()
        except _NOT_PYTHON as error:
            rows.append(_named(selected.slice(number, 1), error))
    return rows


def _named(row: pa.Table, error: Exception) -> Exception:
    """Return an error that names the column which Python cannot hold, and its type with a time zone."""
    if isinstance(error, UnicodeDecodeError):
        return error
    for name, column in zip(row.column_names, row.columns, strict=True):
        try:
            column.to_pylist()
        except _NOT_PYTHON:
            return UserError(f"column {printable(name)}: {printable(column.type)} cannot be read: {flat(error)}")
    raise AssertionError from error


def _read(row: Draft, values: Mapping[str, Any] | Exception, spec: PromptSpec) -> None:
    """Set the prompt (text or token ids), sampling parameters, labels and answer format of `row` from its `values`."""
    if isinstance(values, UnicodeDecodeError):
        raise UserError(f"not UTF-8: {values}")
    if isinstance(values, Exception):
        raise values
    section = spec.input
    request = read_batch_row(values) if section.is_batch else None
    _set_prompt(row, values, request, spec)
    if request is not None:
        changes = request.sampling
        if request.output_format is not None and spec.choices:
            raise UserError("body: response_format cannot be combined with the job's choices")
        row.form = request.output_format
    else:
        own = section.sampling or {}
        changes = values[own] or {} if isinstance(own, str) else column_overrides(values, own)
        row.form = _own_form(values, spec)
    row.params, row.sampling = own_sampling(spec.sampling, changes)
    row.choices = None if section.choices is None else values[section.choices]
    if row.choices is not None:
        check_labels(row.choices)
    elif section.choices is not None and not spec.choices:
        raise UserError("choices is null")
    if row.choices is not None or spec.choices:
        check_compatible("choices", row.params)
    if row.form is not None or spec.output_format is not None:
        check_compatible("output_format", row.params)


def _set_prompt(row: Draft, values: Mapping[str, Any], request: CompletionRequest | None, spec: PromptSpec) -> None:
    """Set the row's prompt. Control tokens in the row's values stay tokens, or are marked to become plain text."""
    section, template, tokenizer = spec.input, spec.input.template, tokenizer_of(spec.checkpoint)
    content: Any = None
    messages: Any = None
    if request is not None:
        content, messages = request.prompt, request.messages
        row.is_chat = content is None
    else:
        row.is_chat = section.is_chat
        if section.messages is not None:
            messages = without_nulls(values[section.messages])
        elif template is None or row.is_chat:
            content = values[str(section.prompt_column)] if template is None else render(template, values)
            if content is None:
                raise UserError("prompt is null")
            messages = [{"role": "user", "content": content}]
            if row.is_chat and not content.strip():
                raise UserError("prompt is empty")
    is_whole = not row.is_chat and template is None  # the row gives the whole prompt
    parses = section.special_tokens == "parse" or (is_whole and section.special_tokens is None)
    if row.is_chat:
        assert spec.chat is not None
        chat, tools = spec.chat.rendered(values), checked_tools(values[section.tools] if section.tools else None)
        row.prompt, count = render_chat(tokenizer, chat, read_messages(messages), tools, parse=parses)
    elif template is not None:
        rendered = partial(render, template)
        row.prompt, count = control_tokens(tokenizer).prompt(rendered, values, source=template, parse=parses)
    elif isinstance(content, list):
        row.prompt, count = _checked_ids(content, spec.vocab_size), 0
    else:
        row.prompt, count = control_tokens(tokenizer).prompt(str, content, source="", parse=parses)
    if isinstance(row.prompt, str) and not row.prompt.strip():
        raise UserError("prompt is empty")
    if isinstance(row.prompt, str) and not is_unicode(row.prompt):
        raise UserError("prompt is not valid Unicode: it holds a lone surrogate")
    row.control_tokens, row.is_marked = count if parses else 0, bool(count and not parses)


def _own_form(values: Mapping[str, Any], spec: PromptSpec) -> OutputFormat | None:
    """Return the answer format in the row's own columns; None if the row has no format of its own (null or "")."""
    for kind, column in (spec.input.output_format or {}).items():
        if values[column]:
            form = OutputFormat(kind, values[column])
            form.check()
            return form
        if spec.output_format is None:
            raise UserError(f"output_format: {kind} is null")
    return None


def _checked_ids(ids: Sequence[int | None], vocab_size: int) -> list[int]:
    if not ids:
        raise UserError("prompt is empty")
    for number, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            shown = "null" if token is None else str(token)
            raise UserError(f"prompt: token {number} is {shown}; the vocabulary is 0 to {vocab_size - 1}")
    return [token for token in ids if token is not None]


def _bound(row: Draft, spec: PromptSpec, label_ids: Mapping[str, tuple[int, ...]], label_tokens: int) -> None:
    """Set the row's `label_tokens`. Refuse a prompt text that is too long to tokenize; `truncate_left` shortens it.

    label_ids: token ids of all labels. label_tokens: the value for a row without labels of its own.
    """
    row.label_tokens = longest(row.choices, label_ids) + 1 if row.choices else label_tokens
    if not isinstance(row.prompt, str):
        return
    if spec.input.too_long == "truncate_left":
        row.prompt = row.prompt[-TRUNCATED_CHARACTERS:]
        return
    least = fewest_tokens(spec.checkpoint, row.prompt)
    if least > spec.context_length - (row.label_tokens or 1):
        raise _no_room(f"at least {least}", row, spec)


def _encode_marked(row: Draft, spec: PromptSpec) -> None:
    """Tokenize the prompt if it holds marked control tokens, which become plain text."""
    if row.is_marked:
        assert isinstance(row.prompt, str)
        control = control_tokens(tokenizer_of(spec.checkpoint))
        row.prompt = control.encode(row.prompt, special_tokens=not row.is_chat)


def _fit(row: Draft, spec: PromptSpec) -> None:
    """Refuse or truncate a prompt (token ids) that leaves no room for the longest label, or for one token of free text.

    A truncated prompt leaves room for the longest label or for `max_new_tokens`.
    """
    tokens, context, truncates = row.prompt, spec.context_length, spec.input.too_long == "truncate_left"
    assert isinstance(tokens, list)
    if not tokens:
        raise UserError("prompt has no tokens")
    answer = row.label_tokens or row.params.max_new_tokens
    if len(tokens) + (answer if truncates and answer < context else row.label_tokens or 1) <= context:
        return
    if not truncates:
        raise _no_room(str(len(tokens)), row, spec)
    if answer >= context:
        raise UserError(f"prompt of {len(tokens)} tokens: {answer} new tokens leave no room in a context of {context}")
    row.prompt = tokens[answer - context :]


def _no_room(tokens: str, row: Draft, spec: PromptSpec) -> UserError:
    answer = f" for a label of {counted(row.label_tokens - 1, 'token')}" if row.label_tokens else ""
    return UserError(f"prompt of {tokens} tokens leaves no room{answer} in a context of {spec.context_length}")
