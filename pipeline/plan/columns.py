"""Columns of the input that a job reads, and what they must be called and hold. Looks at no data."""

from __future__ import annotations

import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.config.job import JobConfig
from pipeline.generate.output import ANSWER_FIELDS, OPTIONAL_FIELDS
from pipeline.messages import printable
from pipeline.prepare.prompts import ADDED
from pipeline.prepare.spec import read_names
from pipeline.read.schema import is_text


def needed_columns(config: JobConfig) -> list[str]:
    """Input columns that the job reads, each once. ValueError if the template does not parse."""
    given = config.input
    try:
        read = read_names(given.prompt_column, given.template, given.messages, given.sampling, given.choices)
    except ValueError as error:
        raise UserError(f"input.template: {error}") from None
    wanted = [given.id, *read, *config.output.keep]
    return list(dict.fromkeys(name for name in wanted if name is not None))


def optional_columns(config: JobConfig) -> tuple[str, ...]:
    """Those of the answers' optional columns that the job writes."""
    asked = {
        "token_ids": config.output.token_ids,
        "cumulative_logprob": config.output.cumulative_logprob,
        "logprobs": config.sampling.logprobs is not None,
        "choice_probability": bool(config.choices or config.input.choices),
    }
    return tuple(name for name in OPTIONAL_FIELDS if asked[name])


def check_columns(config: JobConfig) -> None:
    """ValueError if columns carried along would collide with the answers' own."""
    for name in needed_columns(config):
        if name in ADDED and name not in config.output.keep:
            raise UserError(f"input: column {printable(name)} has a name that the job uses itself; rename it")
    for name in config.output.keep:
        if config.output.keep.count(name) > 1:
            raise UserError(f"output.keep: {printable(name)} is there twice; leave one out")
    answers = {field.name for field in [*ANSWER_FIELDS, *OPTIONAL_FIELDS.values()]}
    for name in config.output.keep:
        if name in answers or name in ADDED:
            raise UserError(
                f"output.keep: {printable(name)} is the name of an answer's column; leave it out or rename the input's"
            )
        if name == "id" and config.input.id != "id":
            raise UserError("output.keep: id is made by the job; set input.id: id to carry the input's along")


def check_type(config: JobConfig, name: str, kind: pa.DataType, url: str) -> None:
    """ValueError if column `name` of file `url` cannot hold what the job reads from it."""
    given = config.input
    for column, fits, wanted in (
        (given.prompt_column, is_text(kind) or _is_ids(kind), "a prompt must be string, or a list of token ids"),
        (given.messages, is_text(kind) or _is_structs(kind), "messages must be a list of structs, or JSON as string"),
        (
            given.sampling,
            is_text(kind) or pa.types.is_struct(kind) or (pa.types.is_map(kind) and is_text(kind.key_type)),
            "sampling must be a struct, a map with string keys, or JSON as string",
        ),
        (given.choices, _is_list(kind) and is_text(kind.value_type), "choices must be a list of strings"),
    ):
        if name == column and not fits:
            raise UserError(f"{url}: column {name!r} is {printable(kind)}; {wanted}")
    if name == given.id and pa.types.is_nested(kind):
        raise UserError(f"{url}: column {name!r} is {printable(kind)}; an id must be one plain value")
    if name == given.prompt_column and given.is_chat and _is_ids(kind):
        raise UserError(
            f"{url}: column {name!r} is {printable(kind)}; token ids go into no chat: leave out chat and system"
        )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_ids(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _is_structs(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_struct(kind.value_type))
