"""The CPU stage: the rows of a shard -> prompts as token ids.

A row's values become text (a prompt column, a template, or a chat), its own sampling parameters and labels. The texts
of all rows are tokenized in batches; a prompt that does not fit the context is refused or truncated. A row that fails
any step keeps its place and gets the reason as its error; it never costs another row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from actors.control_tokens import control_tokens
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.engine.types import SamplingParams, check_compatible
from actors.openai_requests import CompletionRequest
from actors.tool_calls import checked_tools, form_of
from pipeline.config.labels import check_labels
from pipeline.input import schema
from pipeline.messages import is_unicode, one_line
from pipeline.prepare.batch_requests import read_batch_row
from pipeline.prepare.chat import read_messages, render_chat
from pipeline.prepare.prompt_spec import PromptSpec, read_names
from pipeline.prepare.row_sampling import own_sampling, read_overrides
from pipeline.prepare.templates import render
from pipeline.prepare.tokenizer import fewest_tokens, longest, tokenize, tokenize_labels, tokenizer_of

TRUNCATED_CHARACTERS = 2**23  # `too_long: truncate_left` reads no more of a prompt, from its end


@dataclass
class Row:
    """A row on its way to a prompt; `error` ends it.

    Args:
        label: tokens of its longest label and the end, or 0.
        is_chat: the chat template has written its text, with special tokens.
        control_tokens: those that the row's values spell.
        is_marked: they are marked in the prompt, see `ControlTokens`.
        tools: whether the prompt offers tools.
    """

    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    sampling: str | None = None
    choices: list[str] | None = None
    form: OutputFormat | None = None
    label: int = 0
    is_chat: bool = False
    control_tokens: int = 0
    is_marked: bool = False
    tools: bool = False
    error: str | None = None

    def encode_marked(self, spec: PromptSpec) -> None:
        """Make token ids of a prompt with marked control tokens, or set the row's error."""
        assert isinstance(self.prompt, str)
        control = control_tokens(tokenizer_of(spec.checkpoint))
        try:
            self.prompt = control.encode(self.prompt, special_tokens=not self.is_chat)
        except UserError as error:
            self.error = str(error)

    def fit(self, spec: PromptSpec) -> None:
        """Refuse or truncate a prompt of token ids that leaves no room for a whole label, or one token of free text.

        Raises UserError with the row's error.
        """
        tokens, context = self.prompt, spec.context_length
        assert isinstance(tokens, list)
        if not tokens:
            raise UserError("prompt has no tokens")
        if len(tokens) + (self.label or 1) <= context:
            return
        if spec.too_long == "error":
            raise UserError(_no_room(str(len(tokens)), self, spec))
        answer = self.label or self.params.max_new_tokens
        if answer >= context:
            raise UserError(
                f"prompt of {len(tokens)} tokens: {answer} new ones leave it no room in a context of {context}"
            )
        self.prompt = tokens[answer - context :]


def bound_length(row: Row, spec: PromptSpec) -> None:
    """Refuse a text that cannot fit the context before it is tokenized, or cut it to the part that truncation reads."""
    if not isinstance(row.prompt, str):
        return
    if spec.too_long == "truncate_left":
        row.prompt = row.prompt[-TRUNCATED_CHARACTERS:]
        return
    least = fewest_tokens(spec.checkpoint, row.prompt)
    if least > spec.context_length - (row.label or 1):
        row.error = _no_room(f"at least {least}", row, spec)


def _no_room(tokens: str, row: Row, spec: PromptSpec) -> str:
    answer = f" for a label of {row.label - 1}" if row.label else ""
    return f"prompt of {tokens} tokens leaves no room{answer} in a context of {spec.context_length}"


# columns added to a shard's table; planning refuses input columns of these names
PROMPT_IDS, ERROR = "__prompt_ids", schema.ERROR
# the row's own: canonical JSON of parameters; labels; form
SAMPLING, CHOICES, FORM = "__sampling", "__choices", "__form"
TOOLS = "__tools"  # true where the prompt offers tools
CONTROL_TOKENS = "__control_tokens"  # that the row's values spell and that are parsed
ADDED = {
    PROMPT_IDS: pa.list_(pa.int32()),
    ERROR: pa.string(),
    SAMPLING: pa.string(),
    CHOICES: pa.list_(pa.string()),
    FORM: pa.struct([("kind", pa.string()), ("text", pa.string()), ("after", pa.bool_())]),
    TOOLS: pa.bool_(),
    CONTROL_TOKENS: pa.int32(),
}
_NOT_PYTHON = (ValueError, OverflowError, LookupError)  # Arrow values that Python cannot hold: years, time zones


def prepare_table(table: pa.Table, spec: PromptSpec) -> pa.Table:
    """The shard's table with the columns of `ADDED`; a failed row has no prompt ids, a good row a null error."""
    table, errors = schema.split_errors(table)
    columns = read_names(
        spec.column,
        spec.template,
        spec.messages,
        spec.sampling_columns,
        spec.choices_column,
        spec.is_batch,
        spec.format_column,
        spec.tools,
        () if spec.chat is None else spec.chat.texts,
    )
    rows = [
        _read_row(values, spec) if error is None else Row(error=error)
        for values, error in zip(_python_rows(table, columns), errors, strict=True)
    ]
    _set_label_tokens(rows, spec)
    for row in rows:
        if row.error is None:
            bound_length(row, spec)
        if row.error is None and row.is_marked:
            row.encode_marked(spec)
    good = [row for row in rows if row.error is None]
    for is_chat in (False, True):  # the tokenizer adds special tokens to texts that no chat template has written
        texts = [row for row in good if row.is_chat == is_chat and isinstance(row.prompt, str)]
        encoded = tokenize(spec.checkpoint, [str(row.prompt) for row in texts], special_tokens=not is_chat)
        for row, tokens in zip(texts, encoded, strict=True):
            row.prompt = tokens
    for row in good:
        try:
            row.fit(spec)
        except UserError as error:
            row.error = str(error)
    return _with_added(table, [row if row.error is None else Row(prompt=[], error=row.error) for row in rows])


def error_table(table: pa.Table, errors: Sequence[str]) -> pa.Table:
    """`prepare_table` of rows that are not read: each gets an error."""
    table, _ = schema.split_errors(table)
    return _with_added(table, [Row(prompt=[], error=error) for error in errors])


def _with_added(table: pa.Table, rows: Sequence[Row]) -> pa.Table:
    added = {
        PROMPT_IDS: [row.prompt for row in rows],
        ERROR: [None if row.error is None else row.error.encode(errors="replace").decode() for row in rows],
        SAMPLING: [row.sampling for row in rows],
        CHOICES: [row.choices for row in rows],
        FORM: [None if row.form is None else asdict(row.form) for row in rows],
        TOOLS: [row.tools or None for row in rows],
        CONTROL_TOKENS: [row.control_tokens or None for row in rows],
    }
    for name, kind in ADDED.items():
        table = table.append_column(name, pa.array(added[name], kind))
    return table


# values of a row


def _python_rows(table: pa.Table, columns: Sequence[str]) -> list[Any]:
    """Rows as dictionaries; an exception in place of a row that Python cannot hold, such as text that is not UTF-8
    (Arrow does not check) or a year 300,000."""
    selected = table.select(list(columns))
    try:
        return list(selected.to_pylist())
    except _NOT_PYTHON:
        rows: list[Any] = []
    for number in range(selected.num_rows):
        try:
            rows += selected.slice(number, 1).to_pylist()
        except _NOT_PYTHON as error:
            rows.append(error)
    return rows


def _read_row(values: Mapping[str, Any] | Exception, spec: PromptSpec) -> Row:
    """The row's text or token ids, its parameters and labels."""
    if isinstance(values, UnicodeDecodeError):
        return Row(error=f"not UTF-8: {values}")
    if isinstance(values, Exception):
        return Row(error=f"cannot be read: {one_line(values)}")
    try:
        is_chat, form = spec.chat is not None, None
        if spec.is_batch:
            request = read_batch_row(values)
            is_chat = request.prompt is None
            tools = _checked_offer(request.tools, spec)
            prompt, spelled = _request_prompt(values, request, tools, spec)
            changes = request.sampling
            form = _checked_form(request, tools, spec)
        else:
            tools = _checked_offer(None if spec.tools is None else values[spec.tools], spec)
            prompt, spelled = _prompt(values, tools, spec)
            changes = _own_changes(values, spec)
            form = _own_form(values, spec)
        params, sampling = own_sampling(spec.sampling, changes)
        choices = None if spec.choices_column is None else values[spec.choices_column]
        if choices is not None:
            check_labels(choices)
        elif spec.choices_column is not None and not spec.choices:
            raise UserError("choices is null")
        if choices is not None or spec.choices:
            check_compatible("choices", params)
        if form is not None or spec.output_format is not None:
            check_compatible("output_format", params)
        if tools and (choices or spec.choices or spec.output_format):
            raise UserError("tools do not go with choices or output_format: a call would have another form")
    except ValueError as error:
        return Row(error=str(error))
    parses = _parses(spec, is_whole=not is_chat and spec.template is None)
    return Row(
        prompt,
        params,
        sampling,
        choices,
        form,
        is_chat=is_chat,
        control_tokens=spelled if parses else 0,
        is_marked=bool(spelled and not parses),
        tools=bool(tools),
    )


def _own_changes(values: Mapping[str, Any], spec: PromptSpec) -> dict[str, Any]:
    if isinstance(spec.sampling_columns, str):
        return read_overrides(values[spec.sampling_columns])
    return {name: values[column] for name, column in spec.sampling_columns.items()}


def _checked_offer(value: Any, spec: PromptSpec) -> list[dict[str, Any]]:
    """The row's tools, whose calls can be read. Raises UserError with the row's error."""
    tools = checked_tools(value)
    if tools:
        form_of(tokenizer_of(spec.checkpoint))
    return tools


def _parses(spec: PromptSpec, *, is_whole: bool) -> bool:
    """Tell whether control tokens that a row spells are parsed. is_whole: no template has written the prompt."""
    return spec.special_tokens == "parse" or (is_whole and spec.special_tokens is None)


def _request_prompt(
    values: Mapping[str, Any], request: CompletionRequest, tools: list[dict[str, Any]], spec: PromptSpec
) -> tuple[str | list[int], int]:
    if request.prompt is not None:
        return _whole_prompt(request.prompt, spec)
    return _chat_prompt(values, read_messages(request.messages), tools, spec)


def _chat_prompt(
    values: Mapping[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]], spec: PromptSpec
) -> tuple[str, int]:
    assert spec.chat is not None
    chat, parses = spec.chat.rendered(values), _parses(spec, is_whole=False)
    text, spelled = render_chat(tokenizer_of(spec.checkpoint), chat, messages, tools, parse=parses)
    return _checked_text(text), spelled


def _whole_prompt(prompt: str | list[int], spec: PromptSpec) -> tuple[str | list[int], int]:
    """A text or token ids that no template has written."""
    if isinstance(prompt, list):
        return _checked_ids(prompt, spec.vocab_size), 0
    control, parses = control_tokens(tokenizer_of(spec.checkpoint)), _parses(spec, is_whole=True)
    return control.prompt(str, _checked_text(prompt), source="", parse=parses)


def _checked_form(request: CompletionRequest, tools: list[dict[str, Any]], spec: PromptSpec) -> OutputFormat | None:
    """The form that a request asks for, or that of the calls that it wants. Raises UserError with the row's error."""
    if request.output_format is not None and spec.choices:
        raise UserError("body: response_format does not go with the job's choices")
    return request.checked_form(tools, tokenizer_of(spec.checkpoint))


def _own_form(values: Mapping[str, Any], spec: PromptSpec) -> OutputFormat | None:
    """The row's own form; None for the job's, or for free text. Raises UserError with the row's error."""
    for kind, column in spec.format_column.items():
        if values[column] is not None:
            after = spec.output_format is not None and spec.output_format.after and kind == "json_schema"
            form = OutputFormat(kind, values[column], after)
            form.check()
            return form
        if spec.output_format is None:
            raise UserError(f"output_format: {kind} is null")
    return None


def _prompt(values: Mapping[str, Any], tools: list[dict[str, Any]], spec: PromptSpec) -> tuple[str | list[int], int]:
    """A row's prompt, and how many control tokens its values spell; they are marked unless they are parsed.

    Raises UserError with the row's error.
    """
    if spec.messages is not None:
        return _chat_prompt(values, read_messages(values[spec.messages]), tools, spec)
    if spec.template is not None and spec.chat is None:
        return _template_prompt(values, spec.template, spec)
    content = values[str(spec.column)] if spec.template is None else render(spec.template, values)
    if content is None:
        raise UserError("prompt is null")
    if spec.chat is None:
        return _whole_prompt(content, spec)
    if _is_blank(content):
        raise UserError("prompt is empty")
    return _chat_prompt(values, [{"role": "user", "content": content}], tools, spec)


def _template_prompt(values: Mapping[str, Any], template: str, spec: PromptSpec) -> tuple[str, int]:
    """A template's text, without a chat template around it."""
    control, parses = control_tokens(tokenizer_of(spec.checkpoint)), _parses(spec, is_whole=False)
    text, spelled = control.prompt(partial(render, template), values, source=template, parse=parses)
    return _checked_text(text), spelled


def _checked_text(text: str) -> str:
    if _is_blank(text):
        raise UserError("prompt is empty")
    if not is_unicode(text):
        raise UserError("prompt is not valid Unicode: it holds a lone surrogate")
    return text


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _checked_ids(ids: Sequence[int | None], vocab_size: int) -> list[int]:
    if not ids:
        raise UserError("prompt is empty")
    for number, token in enumerate(ids):
        if token is None or not 0 <= token < vocab_size:
            shown = "null" if token is None else str(token)
            raise UserError(f"prompt: token {number} is {shown}; the vocabulary is 0 to {vocab_size - 1}")
    return [token for token in ids if token is not None]


# lengths


def _set_label_tokens(rows: Sequence[Row], spec: PromptSpec) -> None:
    """Set `label` of each row; a row whose labels are unusable gets an error."""
    own = [label for row in rows if row.error is None for label in row.choices or ()]
    labels = [*spec.choices, *own]
    ids = tokenize_labels(tokenizer_of(spec.checkpoint), labels) if labels else {}
    of_job = longest(spec.choices, ids) + 1 if spec.choices else 0
    for row in rows:
        if row.error is None:
            try:
                row.label = longest(row.choices, ids) + 1 if row.choices else of_job
            except UserError as error:
                row.error = str(error)
