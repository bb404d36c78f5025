"""Determines the names of the input columns that a job reads, and checks their names and types. Reads no data."""

from __future__ import annotations

import re
from dataclasses import fields

import pyarrow as pa

from actors.answers import ANSWER_TYPES, OPTIONAL_TYPES
from actors.engine.errors import UserError
from actors.engine.types import SamplingParams
from pipeline.config.job import JobConfig
from pipeline.input.schema import is_text
from pipeline.input.text_files import TextColumns
from pipeline.messages import printable
from pipeline.prepare.prompt_spec import read_names
from pipeline.prepare.prompts import ADDED
from pipeline.prepare.templates import is_template


def needed_columns(config: JobConfig) -> list[str]:
    """Return the input columns that the job reads, each once. Raises UserError if a template does not parse."""
    names = [config.input.id_column, *read_names(config.input), *kept_columns(config)]
    return list(dict.fromkeys(name for name in names if name is not None))


def text_columns(config: JobConfig) -> TextColumns:
    """Return the columns to read from a JSON Lines or CSV file, and which of them hold JSON or numbers."""
    section = config.input
    as_json = [
        "body" if section.is_batch else None,
        section.messages,
        section.tools,
        (section.output_format or {}).get("json_schema"),
    ]
    own = section.sampling.items() if isinstance(section.sampling, dict) else ()
    kinds = {field.name: str(field.type).removesuffix(" | None") for field in fields(SamplingParams)}
    names = {column: kinds[name] for name, column in own if column != section.id_column}  # an id keeps its zeros
    numbers = {column: _CSV_TYPES[kind] for column, kind in names.items() if kind in _CSV_TYPES}
    return TextColumns(needed_columns(config), frozenset(filter(None, as_json)), numbers, section.csv_field_bytes)


_CSV_TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


def kept_columns(config: JobConfig) -> list[str]:
    """Return the input columns to copy to the output besides the id. For a batch file, add `url`."""
    added = ["url"] if config.input.is_batch and "url" not in config.output.keep else []
    return [*config.output.keep, *added]


def optional_columns(config: JobConfig) -> tuple[str, ...]:
    """Return the optional answer columns (names from `OPTIONAL_TYPES`) that the job writes."""
    written = {
        "token_ids": config.output.token_ids,
        "cumulative_logprob": config.output.cumulative_logprob,
        "logprobs": config.sampling.logprobs is not None or config.input.is_batch,
        "choice_probability": bool(config.choices or config.input.choices),
        "reasoning": config.reasoning is not None,
    }
    return tuple(name for name in OPTIONAL_TYPES if written[name])


def check_columns(config: JobConfig) -> None:
    """Raise UserError if an input column is copied twice, or has the name of a column that the job adds.

    Also raise UserError if the template has only single braces, or if all prompts and greedy answers would be the same.
    """
    template = config.input.template or ""
    if not is_template(template) and (found := re.search(r"\{ *(\w+) *\}", template)):
        raise UserError(f"input.template: write {{{{ {found[1]} }}}} instead of {found[0]} to insert a column")
    if template and not read_names(config.input) and not config.sampling.temperature:
        rule = "insert one, such as {{ text }}, and put the template in quotes if it holds #"
        raise UserError(f"input.template: inserts no column, so all answers would be the same; {rule}")
    for name in needed_columns(config):
        if name in ADDED and name not in config.output.keep:
            raise UserError(f"input: column {printable(name)} has a name that the job itself uses; rename it")
    answers = {*ANSWER_TYPES, *OPTIONAL_TYPES}
    for name in config.output.keep:
        if config.output.keep.count(name) > 1:
            raise UserError(f"output.keep: {printable(name)} is listed twice; remove one")
        if name in answers or name in ADDED:
            raise UserError(
                f"output.keep: {printable(name)} is the name of an answer column; remove it or rename the input column"
            )
        if name == "id" and config.input.id_column != "id":
            raise UserError("output.keep: the job writes its own ids; to keep those of the input, set input.id: id")


def check_type(config: JobConfig, name: str, kind: pa.DataType, url: str) -> None:
    """Raise UserError if the job cannot read the type `kind` of the column `name` in the file `url`."""
    section = config.input
    chat = section.prompt_column if section.is_chat else None
    for column, fits, rule in (
        (section.id_column, not pa.types.is_nested(kind), "an id must be one plain value"),
        (section.prompt_column, is_text(kind) or _is_ids(kind), "a prompt must be a string or a list of token ids"),
        (chat, is_text(kind), "a chat needs text: remove chat, system and examples"),
        (section.messages, is_text(kind) or _is_structs(kind), "messages must be a list of structs or a JSON string"),
        (section.sampling, pa.types.is_struct(kind), "sampling must be a struct; or name a column for each parameter"),
        ("custom_id" if section.is_batch else None, is_text(kind), "a custom_id must be a string"),
        (next(iter((section.output_format or {}).values()), None), is_text(kind), "an output format must be a string"),
        (section.tools, is_text(kind) or _is_structs(kind), "tools must be a list of structs or a JSON string"),
        (section.choices, _is_list(kind) and is_text(kind.value_type), "choices must be a list of strings"),
    ):
        if name == column and not fits:
            raise UserError(f"{url}: column {name!r} is {printable(kind)}; {rule}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_ids(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _is_structs(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_struct(kind.value_type))
