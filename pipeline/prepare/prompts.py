"""The CPU stage: a shard's rows -> prompts as token ids, each row checked on its own.

A row that cannot be answered keeps its place, with the reason in `error`; it never costs another row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from actors.engine.choices import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.loading import load_tokenizer
from actors.engine.types import SamplingParams
from pipeline.checkpoints.local import PinnedFolder
from pipeline.checkpoints.resolve import RemoteCheckpoint, ResolvedCheckpoint, fetch
from pipeline.config.job import JobConfig
from pipeline.config.labels import check_compatible, check_labels, longest, tokenize_labels
from pipeline.messages import is_unicode, one_line
from pipeline.prepare.chat import Chat, read_messages
from pipeline.prepare.chat_template import check_chat, render_chat
from pipeline.prepare.row_sampling import own_sampling, read_overrides
from pipeline.prepare.templates import render, template_columns
from pipeline.read import schema

# added to the shard's table; no input column is called so: checked when the job is planned
PROMPT_IDS, ERROR = "__prompt_ids", schema.ERROR
SAMPLING, CHOICES = "__sampling", "__choices"  # the row's own: canonical JSON of parameters; labels
ADDED = {
    PROMPT_IDS: pa.list_(pa.int32()),
    ERROR: pa.string(),
    SAMPLING: pa.string(),
    CHOICES: pa.list_(pa.string()),
}
TOKENIZE_CHARACTERS = 2**20
_UNREADABLE = (ValueError, OverflowError, LookupError)  # of Arrow's values as Python's: text, years, time zones


@dataclass(frozen=True)
class PromptSpec:
    """How a row becomes a prompt, and what else it may say.

    column, template or messages: one of them. chat: None for plain text. sampling, choices: the job's, on top
    of which come the row's: sampling_columns is a column of parameters, or a column for each parameter.
    vocab_size, context_length: tokens. too_long: ``error`` or ``truncate_left``; a truncated prompt leaves
    room for the answer.
    """

    checkpoint: str | PinnedFolder | RemoteCheckpoint
    vocab_size: int
    context_length: int
    column: str | None = None
    template: str | None = None
    messages: str | None = None
    chat: Chat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_columns: str | Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    choices_column: str | None = None
    too_long: str = "error"


def prompt_spec(config: JobConfig, located: ResolvedCheckpoint, planned: float) -> PromptSpec:
    """The spec of a job. planned: when it was, seconds since 1970; what chat templates are told is now."""
    given, checkpoint = config.input, located.checkpoint
    examples = tuple((one.user, one.assistant) for one in given.examples)
    return PromptSpec(
        checkpoint=located.pinned(),
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.context_length,
        column=given.prompt_column,
        template=given.template,
        messages=given.messages,
        chat=Chat(given.system, examples, given.chat_template_kwargs, planned) if given.is_chat else None,
        sampling=config.sampling.params(),
        sampling_columns=given.sampling or {},
        choices=config.choices or (),
        choices_column=given.choices,
        too_long=given.too_long,
    )


def check_spec(spec: PromptSpec) -> None:
    """ValueError of one line for what would spoil every row of the job: chat template, labels, room for answers."""
    if spec.chat is not None:
        check_chat(tokenizer_of(spec.checkpoint), spec.chat, _shown(spec.checkpoint))
    outside = [token for token in spec.sampling.stop_token_ids if token >= spec.vocab_size]
    if outside:
        raise UserError(f"sampling.stop_token_ids: {outside[0]} lies outside the vocabulary of {spec.vocab_size}")
    context = spec.context_length
    if spec.choices:
        ids = _label_ids(spec, spec.choices)
        most = longest(spec.choices, ids)
        try:
            ChoiceTrie([ids[label] for label in spec.choices], tokenizer_of(spec.checkpoint).eos_token_id)
        except ValueError as error:
            raise UserError(f"choices: {error} (counted from 0)") from None
        if most + 1 >= context:
            raise UserError(f"choices: a label of {most} tokens leaves prompts no room in a context of {context}")
    elif spec.too_long == "truncate_left" and spec.sampling.max_new_tokens >= context:
        raise UserError(
            f"sampling.max_new_tokens = {spec.sampling.max_new_tokens} leaves truncated prompts no room in a context "
            f"of {context}: lower it, or set input.too_long: error"
        )


def read_names(
    column: str | None,
    template: str | None,
    messages: str | None,
    sampling: str | Mapping[str, str] | None,
    choices: str | None,
) -> list[str]:
    """Columns that a row's prompt, sampling and choices come from, each once. ValueError if the template is wrong."""
    prompt = [column, messages] if template is None else template_columns(template)
    own = [sampling] if isinstance(sampling, str) else list((sampling or {}).values())
    return list(dict.fromkeys(name for name in [*prompt, *own, choices] if name is not None))


@dataclass
class _Row:
    """What a row has come to so far; `error` ends it."""

    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    sampling: str | None = None
    choices: list[str] | None = None
    error: str | None = None


def prepare_table(table: pa.Table, spec: PromptSpec) -> pa.Table:
    """The shard's table with the columns of `ADDED`; a bad row has no prompt ids, a good one a null error."""
    table, unfit = schema.split_errors(table)
    columns = read_names(spec.column, spec.template, spec.messages, spec.sampling_columns, spec.choices_column)
    rows = [
        _read(values, spec) if error is None else _Row(error=error)
        for values, error in zip(_rows(table, columns), unfit, strict=True)
    ]
    texts = [row.prompt for row in rows if row.error is None and isinstance(row.prompt, str)]
    encoded = tokenize(texts, spec)
    own = [label for row in rows if row.error is None for label in row.choices or ()]
    label_ids = _label_ids(spec, [*spec.choices, *own])
    job_label = longest(spec.choices, label_ids) if spec.choices else 0
    for row in rows:
        if row.error is None:
            tokens = row.prompt if isinstance(row.prompt, list) else next(encoded)
            try:
                label = longest(row.choices, label_ids) if row.choices else job_label
                row.prompt = _fit(tokens, row.params, label, spec)
            except ValueError as error:
                row.error = str(error)
    good = [row if row.error is None else _Row(prompt=[], error=row.error) for row in rows]
    added = {
        PROMPT_IDS: [row.prompt for row in good],
        ERROR: [None if row.error is None else row.error.encode(errors="replace").decode() for row in good],
        SAMPLING: [row.sampling for row in good],
        CHOICES: [row.choices for row in good],
    }
    for name, kind in ADDED.items():
        table = table.append_column(name, pa.array(added[name], kind))
    return table


@lru_cache(maxsize=2)
def tokenizer_of(checkpoint: str | PinnedFolder | RemoteCheckpoint) -> Any:
    """The checkpoint's tokenizer, loaded once a process. ValueError of one line if it is damaged."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Ray runs several of these side by side
    try:
        return load_tokenizer(fetch(checkpoint, weights=False))
    except (ValueError, LookupError, OSError) as error:
        raise UserError(f"{_shown(checkpoint)}: the tokenizer cannot be loaded: {one_line(error)}") from None


def _shown(checkpoint: str | PinnedFolder | RemoteCheckpoint) -> str:
    return checkpoint if isinstance(checkpoint, str) else checkpoint.path


def tokenize(texts: Sequence[str], spec: PromptSpec) -> Iterator[list[int]]:
    """Token ids of each text, `TOKENIZE_CHARACTERS` at a time: a tokenizer holds over 100 bytes for each token."""
    special = spec.chat is None  # a chat template writes special tokens itself
    first = size = 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= TOKENIZE_CHARACTERS or end == len(texts):
            tokenizer = tokenizer_of(spec.checkpoint)
            yield from tokenizer(
                list(texts[first:end]), add_special_tokens=special, return_attention_mask=False, verbose=False
            )["input_ids"]
            first, size = end, 0


def given_up(table: pa.Table, errors: Sequence[str]) -> pa.Table:
    """As `prepare_table`, for rows that are not looked at: each has an error."""
    table, _ = schema.split_errors(table)
    added: dict[str, list[Any]] = {
        PROMPT_IDS: [[]] * table.num_rows,
        ERROR: list(errors),
        SAMPLING: [None] * table.num_rows,
        CHOICES: [None] * table.num_rows,
    }
    for name, kind in ADDED.items():
        table = table.append_column(name, pa.array(added[name], kind))
    return table


def _label_ids(spec: PromptSpec, labels: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return tokenize_labels(tokenizer_of(spec.checkpoint), labels) if labels else {}


def _read(values: Mapping[str, Any] | Exception, spec: PromptSpec) -> _Row:
    if isinstance(values, UnicodeDecodeError):
        return _Row(error=f"not UTF-8: {values}")
    if isinstance(values, Exception):
        return _Row(error=f"cannot be read: {one_line(values)}")
    try:
        prompt = _prompt(values, spec)
        if isinstance(spec.sampling_columns, str):
            changes = read_overrides(values[spec.sampling_columns])
        else:
            changes = {name: values[column] for name, column in spec.sampling_columns.items()}
        params, sampling = own_sampling(spec.sampling, changes)
        choices = None if spec.choices_column is None else values[spec.choices_column]
        if choices is not None:
            check_labels(choices)
        elif spec.choices_column is not None and not spec.choices:
            raise UserError("choices is null")
        if choices is not None or spec.choices:
            check_compatible(params)
    except ValueError as error:
        return _Row(error=str(error))
    return _Row(prompt, params, sampling, choices)


def _prompt(values: Mapping[str, Any], spec: PromptSpec) -> str | list[int]:
    """A row's prompt as text, or as the token ids it came as. ValueError is the row's error."""
    if spec.messages is not None:
        messages = read_messages(values[spec.messages])
    else:
        found = values[str(spec.column)] if spec.template is None else render(spec.template, values)
        if isinstance(found, list):
            return _checked_ids(found, spec.vocab_size)
        if not (found and found.strip()):
            raise UserError("prompt is null" if found is None else "prompt is empty")
        messages = [{"role": "user", "content": found}]
    if spec.chat is None:
        text: str = messages[0]["content"]
    else:
        text = render_chat(tokenizer_of(spec.checkpoint), spec.chat, messages)
    if not text.strip():
        raise UserError("prompt is empty")
    if not is_unicode(text):
        raise UserError("prompt is not valid Unicode: it holds a lone surrogate")
    return text


def _checked_ids(ids: list[int | None], vocab_size: int) -> list[int]:
    if not ids:
        raise UserError("prompt is empty")
    for place, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            said = "null" if token is None else str(token)
            raise UserError(f"prompt: token {place} is {said}; the vocabulary is 0 to {vocab_size - 1}")
    return [token for token in ids if token is not None]


def _rows(table: pa.Table, columns: Sequence[str]) -> list[Any]:
    """Rows as dictionaries; in place of one with values that Python cannot hold, such as text that is not UTF-8
    (Arrow does not check) or a year 300,000, the error."""
    picked = table.select(list(columns))
    try:
        whole: list[Any] = picked.to_pylist()
        return whole
    except _UNREADABLE:
        found: list[Any] = []
    for row in range(picked.num_rows):
        try:
            found += picked.slice(row, 1).to_pylist()
        except _UNREADABLE as error:
            found.append(error)
    return found


def _fit(tokens: list[int], params: SamplingParams, label: int, spec: PromptSpec) -> list[int]:
    """Tokens that leave room for the answer: a whole label, of other text one token. ValueError is the row's error.

    label: tokens of the longest label, 0 if the row is answered freely.
    """
    if not tokens:
        raise UserError("prompt has no tokens")
    context = spec.context_length
    room = label + 1 if label else params.max_new_tokens
    if len(tokens) + (room if label else 1) <= context:
        return tokens
    if spec.too_long == "error":
        answer = f" for a label of {label}" if label else ""
        raise UserError(f"prompt of {len(tokens)} tokens leaves no room{answer} in a context of {context}")
    if room >= context:
        raise UserError(f"prompt of {len(tokens)} tokens: {room} new ones leave it no room in a context of {context}")
    return tokens[room - context :]
