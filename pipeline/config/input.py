"""The section `input` of job files: where the rows are, and how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from actors.engine.errors import UserError, suggestion
from actors.engine.types import SamplingParams
from pipeline.config.base import Place, Section
from pipeline.config.forms import FormColumn

LONGEST_RECORD = 2**27  # bytes of a row of text
TableFormat = Literal["iceberg", "delta"]
InputFormat = Literal["parquet", "jsonl", "csv", "openai_batch", TableFormat]


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _sampling_columns(value: Any) -> Any:
    if isinstance(value, dict):
        known = [one.name for one in fields(SamplingParams)]
        for name, column in value.items():
            if name not in known:
                raise UserError(f"unknown parameter {name}; {suggestion(name, known)}")
            if not isinstance(column, str):
                raise UserError(f"{name} must name a column")
        if value:
            return value
    if value is None or (isinstance(value, str) and value):
        return value
    raise UserError("must name a struct column, or give columns as {parameter: column}")


Paths = Annotated[list[Place], BeforeValidator(one_or_many), Field(min_length=1)]


class ExampleConfig(Section):
    user: str = Field(min_length=1, description="what the user says")
    assistant: str = Field(min_length=1, description="the answer to it")


class InputConfig(Section):
    """Prompts come from a column of text or token ids, from a template, or from a column of messages.

    `chat`, `system` and `examples` make a text the last user message of a chat.
    """

    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "continuations": (None, "given texts are not scored here: vLLM does it")
    }

    path: Paths = Field(
        description="input file, folder or glob, or a list of them, local or s3://; or a table: its name "
        "(namespace.table) in storage.catalog, of Delta its folder"
    )
    format: InputFormat | None = Field(
        None,
        description="jsonl: an object a line; csv: names of columns in the first line; openai_batch: JSON lines of "
        "requests; each may be gzipped (.gz); iceberg, delta: a table; default by suffix (.jsonl, .csv), else parquet; "
        "of a folder: .parquet",
    )
    snapshot: int | None = Field(
        None, ge=0, description="Iceberg's snapshot id, Delta's version; default: the newest at planning"
    )
    csv_field_bytes: int = Field(
        2**20,
        ge=1,
        le=LONGEST_RECORD,
        description="of a CSV file, bytes of a quoted field, at most: a longer one is taken for a quote never closed",
    )
    id: str | None = Field(None, description="column copied to `id`; default: the file's path below the input, and row")
    prompt: str | None = Field(None, description="column of text, or of lists of token ids; default 'prompt'")
    template: str | None = Field(
        None, description="Jinja2 template over the row's columns, such as meta.question, tags[0]"
    )
    messages: str | None = Field(
        None, description="column of chats: structs with role and content (text or parts), or JSON"
    )
    chat: bool = Field(False, description="make the text a user message; implied by system and examples")
    system: str | None = Field(
        None,
        min_length=1,
        description="system message of every chat whose messages have none; may be a template over the row's columns",
    )
    examples: list[ExampleConfig] = Field(
        default_factory=list,
        description="exchanges between the system message and each row's messages; may be templates like system",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="values for the checkpoint's chat template, such as enable_thinking"
    )
    sampling: Annotated[str | dict[str, str] | None, BeforeValidator(_sampling_columns)] = Field(
        None,
        description="sampling per row: a struct, map or JSON column, or {parameter: column}; null: the job's",
    )
    choices: str | None = Field(
        None, description="column of lists of labels for the row's answer; null: the job's choices"
    )
    output_format: FormColumn | None = Field(
        None,
        description="{json_schema: column}, {regex: column} or {grammar: column}: text columns with the form of each "
        "row's answer; null: the job's output_format",
    )
    tools: str | None = Field(
        None,
        description="column of tools for the chat template, a list or JSON: [{type: function, function: {name, "
        "description, parameters}}]; null: none. Calls become the column tool_calls",
    )
    continue_final: bool = Field(False, description="answers continue the assistant's last message, if it is the last")
    special_tokens: Literal["text", "parse"] | None = Field(
        None,
        description="control tokens such as <|im_end|> that the input spells: text, or parse them; default: text in "
        "the contents of chats and in columns that a template prints, parse in a prompt column",
    )
    too_long: Literal["error", "truncate_left"] = Field(
        "error", description="a prompt that fills the context: a row error, or keep its last tokens"
    )
    since: Literal["last_success"] | None = Field(
        None,
        description="incremental runs: each answers the files that no successful run has answered, in a folder by date",
    )
    duplicate_ids: Literal["warn", "error"] = Field(
        "warn",
        description="ids that repeat, of a column: counted over all rows at the end; error: refused, before the start "
        "where the input is Parquet, else at the end without _SUCCESS",
    )
    changed: Literal["error", "reprocess", "ignore"] = Field(
        "error",
        description="with since, a file that changed after it was answered: stop, answer it again, or keep its answers",
    )
    unreadable: Literal["error", "later"] = Field(
        "error",
        description="with since, a new file that cannot be read or lacks a column: stop, or leave it for a later run",
    )
    retry: Literal["errors"] | None = Field(
        None,
        description="with since, rows whose answer has an error are answered again, in a dated folder of their own; "
        "default: never",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> InputConfig:
        self._check_table()
        for name in ("changed", "unreadable"):
            if self.since is None and getattr(self, name) != "error":
                raise UserError(f"{name} is for incremental runs: give since: last_success too")
        if self.retry is not None and (self.since is None or self.is_table):
            raise UserError("retry is for incremental runs over files: give since: last_success too, or leave it out")
        given = [name for name in ("prompt", "template", "messages") if getattr(self, name) is not None]
        own = [
            *given,
            *(name for name in ("id", "chat", "sampling", "choices", "output_format", "tools") if getattr(self, name)),
        ]
        if self.is_batch and own:
            raise UserError(f"{own[0]} does not go with format: openai_batch: each line is a whole request")
        if len(given) > 1:
            raise UserError(f"give {given[0]} or {given[1]}, not both")
        if self.tools is not None and not self.is_chat:
            raise UserError("tools is for chats: give messages, system, examples or chat: true")
        if self.continue_final and self.messages is None and not self.is_batch:
            raise UserError("continue_final is for chats whose last message may be the assistant's: give messages")
        if self.chat_template_kwargs and not self.is_chat:
            raise UserError("chat_template_kwargs is for chats: give messages, system, examples or chat: true")
        return self

    def _check_table(self) -> None:
        if not self.is_table:
            if self.snapshot is not None:
                raise UserError("snapshot is of a table: set format: iceberg or delta too")
            return
        if len(self.path) > 1:
            raise UserError(f"format: {self.format} reads one table; give one path")
        if self.snapshot is not None and self.since is not None:
            raise UserError("give snapshot or since, not both")
        for name in ("changed", "unreadable"):
            if getattr(self, name) != "error":
                raise UserError(f"{name} is for files: a table's snapshots tell what was added")

    @property
    def is_table(self) -> bool:
        """Whether the input is an Iceberg or Delta table."""
        return self.format in get_args(TableFormat)

    @property
    def prompt_column(self) -> str | None:
        """The column of prompts; None for a template, messages or requests."""
        other = self.is_batch or self.template is not None or self.messages is not None
        return None if other else self.prompt or "prompt"

    @property
    def chat_texts(self) -> list[str]:
        """Texts other than `template` that may be templates over the row's columns."""
        return [self.system or "", *(text for one in self.examples for text in (one.user, one.assistant))]

    @property
    def id_column(self) -> str | None:
        """The column that is copied to `id`."""
        return "custom_id" if self.is_batch else self.id

    @property
    def is_batch(self) -> bool:
        """Whether the input is an OpenAI batch file."""
        return self.format == "openai_batch"

    @property
    def is_chat(self) -> bool:
        """Whether the checkpoint's chat template writes the prompts."""
        return self.is_batch or self.chat or self.messages is not None or self.system is not None or bool(self.examples)
