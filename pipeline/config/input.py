"""Defines the section `input` of job files: where the rows are, and how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from actors.engine.errors import UserError, suggestion
from actors.engine.types import NEUTRAL, SamplingParams
from pipeline.config.base import Place, Section
from pipeline.config.forms import FormColumn

LONGEST_RECORD = 2**27  # maximum bytes of a row in a text file
InputFormat = Literal["parquet", "jsonl", "csv", "openai_batch"]


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _sampling_columns(value: Any) -> Any:
    known = [one.name for one in fields(SamplingParams)]
    for name, column in value.items() if isinstance(value, dict) else ():
        if name not in (*known, *NEUTRAL):
            raise UserError(f"unknown parameter {name}; {suggestion(name, known)}")
        if not isinstance(column, str):
            raise UserError(f"{name} must name a column")
    if value is None or (isinstance(value, str | dict) and value):
        return value
    raise UserError("must name a struct column, or give columns as {parameter: column}")


Paths = Annotated[list[Place], BeforeValidator(one_or_many), Field(min_length=1)]


class ExampleConfig(Section):
    user: str = Field(min_length=1, description="what the user says")
    assistant: str = Field(min_length=1, description="what the assistant answers")


class InputConfig(Section):
    """Prompts come from a column of text or token ids, from a template, or from a column of messages.

    If `chat`, `system` or `examples` is set, the text of the prompt becomes the last user message of a chat.
    """

    path: Paths = Field(description="input file, folder or glob, or a list of these, local or s3://")
    format: InputFormat | None = Field(
        None,
        description="jsonl: one JSON object per line; csv: column names in the first line; openai_batch: one request "
        "per line, as JSON. Files of these three formats may be gzipped (.gz). Default: the format of the suffix "
        "(.jsonl, .csv), else parquet. From a folder, the default reads only .parquet files",
    )
    csv_field_bytes: int = Field(
        2**20,
        ge=1,
        le=LONGEST_RECORD,
        description="maximum bytes of a quoted field in a CSV file; a longer field is refused as an unclosed quote",
    )
    id: str | None = Field(
        None, description="column to copy to the output column `id`; default: ids made of file path and row number"
    )
    prompt: str | None = Field(None, description="column with prompts: text, or lists of token ids; default 'prompt'")
    template: str | None = Field(
        None,
        min_length=1,
        description="Jinja2 template that makes the prompt from a row's columns, such as meta.question or tags[0]",
    )
    messages: str | None = Field(
        None, description="column with chats: lists of structs with role and content (text or parts), or JSON text"
    )
    chat: bool = Field(False, description="make the prompt the user message of a chat; implied by system and examples")
    system: str | None = Field(
        None,
        min_length=1,
        description="system message for every chat without one; may be a Jinja2 template over the row's columns",
    )
    examples: list[ExampleConfig] = Field(
        default_factory=list,
        description="example exchanges to insert after the system message of each chat; may be Jinja2 templates",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="values for the checkpoint's chat template, such as enable_thinking"
    )
    sampling: Annotated[str | dict[str, str] | None, BeforeValidator(_sampling_columns)] = Field(
        None,
        description="column of structs with sampling parameters per row, or {parameter: column}; null in a row: the "
        "job's value",
    )
    choices: str | None = Field(
        None, description="column in which each row lists the labels for its answer; null in a row: the job's choices"
    )
    output_format: FormColumn | None = Field(
        None,
        description="{json_schema: column}, {regex: column} or {grammar: column}: a text column with the form of each "
        "row's answer; null in a row: the job's output_format",
    )
    tools: str | None = Field(
        None,
        description="column with tools for the chat template, as a list or as JSON text: [{type: function, "
        "function: {name, description, parameters}}]; null: no tools. Calls stay in the answer as text",
    )
    continue_final: bool = Field(
        False, description="if a chat ends with an assistant's message, the answer continues that message"
    )
    special_tokens: Literal["text", "parse"] | None = Field(
        None,
        description="how to read control tokens such as <|im_end|> in the input. text: as text; parse: as tokens. "
        "Default: parse in a prompt column; text in the contents of chats and in columns that a template inserts",
    )
    too_long: Literal["error", "truncate_left"] = Field(
        "error",
        description="error: a prompt that fills the context gets an error; truncate_left: a prompt that leaves "
        "no room for max_new_tokens keeps only its last tokens",
    )
    since: Literal["last_success"] | None = Field(
        None,
        description="last_success: a run answers only the files without a successful run, and writes a dated folder",
    )
    changed: Literal["error", "reprocess", "ignore"] = Field(
        "error",
        description="what a run with `since` does if a file changed after it was answered. error: stop; "
        "reprocess: answer the file again; ignore: keep the old answers",
    )
    unreadable: Literal["error", "later"] = Field(
        "error",
        description="what a run with `since` does if a new file cannot be read or lacks a column. error: stop; later: "
        "decode the needed columns of new files first, and leave such a file for a later run",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> InputConfig:
        for name in ("changed", "unreadable"):
            if self.since is None and getattr(self, name) != "error":
                raise UserError(f"{name} is for incremental runs: add since: last_success")
        given = [name for name in ("prompt", "template", "messages") if getattr(self, name) is not None]
        own = [
            *given,
            *(name for name in ("id", "chat", "sampling", "choices", "output_format", "tools") if getattr(self, name)),
        ]
        if self.is_batch and own:
            raise UserError(f"{own[0]} cannot be combined with format: openai_batch; each line is a whole request")
        if len(given) > 1:
            raise UserError(f"give {given[0]} or {given[1]}, not both")
        if self.tools is not None and not self.is_chat:
            raise UserError("tools is for chats: give messages, system, examples or chat: true")
        if self.continue_final and self.messages is None and not self.is_batch:
            raise UserError("continue_final needs chats that can end with an assistant's message: give messages")
        if self.chat_template_kwargs and not self.is_chat:
            raise UserError("chat_template_kwargs is for chats: give messages, system, examples or chat: true")
        return self

    @property
    def prompt_column(self) -> str | None:
        """The column with prompts; None if prompts come from a template, messages or batch requests."""
        other = self.is_batch or self.template is not None or self.messages is not None
        return None if other else "prompt" if self.prompt is None else self.prompt

    @property
    def chat_texts(self) -> list[str]:
        """The system message and the texts in `examples`. They may be Jinja2 templates over a row's columns."""
        return [self.system or "", *(text for one in self.examples for text in (one.user, one.assistant))]

    @property
    def id_column(self) -> str | None:
        """The input column that is copied to the output column `id`."""
        return "custom_id" if self.is_batch else self.id

    @property
    def is_batch(self) -> bool:
        """Whether the input is an OpenAI batch file."""
        return self.format == "openai_batch"

    @property
    def is_chat(self) -> bool:
        """Whether the checkpoint's chat template writes the prompts."""
        return self.is_batch or self.chat or self.messages is not None or self.system is not None or bool(self.examples)
