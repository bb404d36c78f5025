"""Writes a commented job file for an input, from the names and types of its columns (`skipdecode init`)."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError
from pipeline.checkpoints.resolve import PLACEHOLDER
from pipeline.config.input import InputFormat
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.config.load import dump_yaml, parse_yaml, validated
from pipeline.input.files import file_format, list_files
from pipeline.input.rows import path_values, read_all_columns
from pipeline.input.schema import is_text, plain
from pipeline.messages import listed, printable
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.storage.working_dir import check_outlives_job

ROWS = 200  # maximum rows of a text file in which to look for columns
FORMATS: tuple[InputFormat | None, ...] = (None, "jsonl", "csv")
IDS = ("id", "uuid", "key", "row_id", "custom_id")  # usual names of columns
CHATS = ("messages", "conversation", "conversations", "chat")
PROMPTS = ("prompt", "question", "instruction", "query", "request")
REQUEST = {"custom_id", "method", "url", "body"}  # keys of an OpenAI batch request
DEMO = "configs/demo/checkpoint"
TEXT = """# Written by `skipdecode init {path}`. `skipdecode keys` lists all keys.
# skipdecode try {name}     answers five rows, and writes nothing
# skipdecode plan {name}    predicts time and cost at each speed
# skipdecode run {name}     answers all rows; the same command resumes the job
# Relative paths begin in the folder in which a command runs; with `ray job submit`, in the copy that Ray uploads.
# Columns: {columns}
{input}  # template: "Summarize: {{{{ COLUMN }}}}"   # in place of prompt: your words, and columns of the row
  # chat: true                      # for a model with a chat template
{output}  # on a cluster: a folder on a disk that all nodes share, or s3://BUCKET/FOLDER
  # keep: []                        # input columns to copy to the answers
  # format: jsonl                   # also write answers.jsonl
{model}  # path: a folder, s3://…, or owner/name@revision on the hub
  # dtype: float32                  # default bfloat16
# schedule: {{speedup: 2}}            # fewer layers for later tokens; first train the model with `skipdecode adapt`
# choices: [positive, negative]     # labels; every answer is one of them
sampling:
  max_new_tokens: 128               # maximum tokens of an answer
  temperature: 0.0                  # 0 is greedy
actors:
  count: 1                          # processes that hold the model
  # gpus: 1                         # GPUs of each process
# price_per_hour: 2.5               # price of a GPU, or of an actor on CPUs, for `plan`
"""


def write_job_file(path: str, output: Path, model: str | None = None) -> list[str]:
    """Write a new job file for the input at `path`: a local or s3:// file, folder or glob.

    model: checkpoint; default: the demo's checkpoint if it is found, else a placeholder. Return lines that tell the
    columns, and what was chosen. Raises UserError if the job file exists, or if no column can be a prompt.
    """
    check_outlives_job("--output", output)
    given, schema = read_columns(path, StorageConfig())
    if output.exists():
        raise UserError(f"{output}: exists already, and is kept; choose another --output")
    keys = propose(schema)
    model = os.path.expanduser(model or (DEMO if Path(DEMO).is_dir() else PLACEHOLDER))
    tokenizer, template = Path(model, "tokenizer_config.json"), Path(model, "chat_template.jinja")
    if template.is_file() or (tokenizer.is_file() and '"chat_template"' in tokenizer.read_text()):
        keys |= {"chat": True} if "prompt" in keys else {}
    keys = {"path": path} | ({"format": given} if given else {}) | keys
    text = job_text(keys, schema.names, output, model, "answers")
    try:
        check_output_disjoint(validated(JobConfig, parse_yaml(text), path))
    except UserError:
        text = job_text(keys, schema.names, output, model, "../answers")
    config = validated(JobConfig, parse_yaml(text), path)
    check_output_disjoint(config)
    check_columns(config)
    try:
        with open(output, "x") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
    return [f"columns: {listed(schema.names)}", dump_yaml({"input": keys, "model": {"path": model}}).rstrip()]


def read_columns(path: str, storage: StorageConfig) -> tuple[InputFormat | None, pa.Schema]:
    """Return `input.format` (None if file names show it), and the columns of the input's first file."""
    files, refusals = dict[str, tuple[int, str]](), list[UserError]()
    for given in FORMATS:  # a folder's name does not show the format of its files
        try:
            files = list_files([path], storage, given)
            break
        except UserError as error:
            refusals.append(error)
    if not files:
        raise refusals[0]
    url, (size, version) = next(iter(files.items()))
    _, schema = read_all_columns(url, size, version, storage, file_format(url, given), ROWS)
    of_path = [pa.field(name, pa.string()) for name in path_values(url) if name not in schema.names]
    return given, pa.schema([*schema, *of_path])


def propose(schema: pa.Schema) -> dict[str, Any]:
    """Return keys of the section `input`. Raises UserError if no column can be a prompt."""
    kinds = {field.name: plain(field.type) for field in schema}
    if set(kinds) >= REQUEST:
        return {"format": "openai_batch"}
    found = next((name for one in IDS for name in kinds if name.lower() == one), None)
    keys = {} if found is None else {"id": found}
    texts = [name for name, kind in kinds.items() if is_text(kind) and name != found]
    items = {name: kind.value_type for name, kind in kinds.items() if types.is_list(kind)}
    chats = [name for name, kind in items.items() if types.is_struct(kind) and {"role", "content"} <= {*kind.names}]
    chats += [name for name in texts if name.lower() in CHATS]  # as JSON
    if chats:
        return {**keys, "messages": chats[0]}
    prompts = [name for one in PROMPTS for name in texts if name.lower() == one]
    prompts += [name for name, kind in items.items() if types.is_integer(kind)]  # as token ids
    if not prompts and not texts:
        raise UserError(f"no column holds text, token ids or chats ({listed(kinds)}); write a job with input.template")
    return {**keys, "prompt": [*prompts, *texts][0]}


def job_text(keys: dict[str, Any], columns: list[str], job: Path, model: str, answers: str) -> str:
    """Return the text of a job file. keys: section `input`. job: name of the file. answers: the output's parent."""
    names = [re.sub(r"[*?\[\]]", "", part.partition(".")[0]) for part in keys["path"].split("/")]
    name = next(filter(None, reversed(names)), Path.cwd().name)  # for a path such as *.csv, the current folder's name
    return TEXT.format(
        path=printable(keys["path"]),
        name=shlex.quote(printable(job)),
        columns=listed(columns),
        input=dump_yaml({"input": keys}),
        output=dump_yaml({"output": {"path": os.path.abspath(f"{answers}/{name}")}}),
        model=dump_yaml({"model": {"path": model}}),
    )
