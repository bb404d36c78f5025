"""Writes a job file with comments, based on the columns of an input (`skipdecode init`)."""

from __future__ import annotations

import json
import keyword
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.compute as pc
from jinja2.defaults import DEFAULT_NAMESPACE

from actors.engine.errors import UserError
from pipeline.checkpoints.resolve import PLACEHOLDER
from pipeline.config.forms import normalized
from pipeline.config.input import InputFormat
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.config.load import dump_yaml, parse_yaml, validated
from pipeline.input.files import OtherFormat, file_format, list_files
from pipeline.input.rows import common_schema, path_values, read_layout, read_shards
from pipeline.input.schema import ERROR
from pipeline.input.shards import cut_shards
from pipeline.input.text_files import TextColumns
from pipeline.messages import listed, printable
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.prepare.chat import Chat, check_chat
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.storage.working_dir import check_outlives_job

ROWS, SAMPLE_BYTES = 200, 2**26  # maximum rows and bytes to read from the first file with rows
FILES = 8  # maximum number of files in which to look for rows
IDS = ("id", "uuid", "key", "row_id", "custom_id", "index", "name")  # usual names of columns with ids
CHATS = ("messages", "conversation", "conversations", "chat")
PROMPTS = ("prompt", "question", "instruction", "query", "request", "input")  # usual names of prompt columns
TEXTS = ("text", "content", "body", "document", "article", "review", "sentence", "description", "title")
ANSWERS = (  # usual names of columns with true answers
    *("label", "labels", "answer", "answers", "reference", "references", "target", "gold", "expected", "summary"),
    *("highlights", "completion", "response", "output", "category", "class", "intent", "sentiment", "emotion"),
)
REQUEST = {"custom_id", "method", "url", "body"}  # keys of an OpenAI batch request
SUMMARY = "\n\nSummary:"  # end of the template for a model without a chat template
LABELS, LABEL_LENGTH = 12, 40  # maximum distinct values in a column of labels, and maximum characters of a label
LONG = 400  # a text with at least this many characters is not an id
RESERVED = {"true", "false", "none", "self", *DEFAULT_NAMESPACE}  # names with another meaning in a template
DEMO = "configs/demo/checkpoint"
SYSTEM = "You do what the user asks, and write nothing else."


@dataclass(frozen=True)
class Sample:
    """A sample of an input. format: `input.format`; None if the file names show it. columns: name -> sampled values."""

    files: int
    format: InputFormat | None
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class Proposal:
    """Proposed keys for the section `input` of a job file. notes: one sentence for each choice, with its reason."""

    keys: dict[str, Any]
    notes: list[str]
    labels: tuple[str, ...] = ()  # values of a column that may hold labels

    def uses(self, column: str) -> bool:
        """Return whether a key names the column, or the template inserts the column."""
        return any(column == value or f"{{ {column} }}" in value for value in self.keys.values())


def write_job_file(path: str, output: Path, model: str | None = None) -> tuple[Sample, Proposal]:
    """Write a new job file for the input at `path`: a local or s3:// file, folder or glob.

    model: checkpoint; default: the demo's checkpoint if it is found, else a placeholder. Raises UserError if the job
    file exists, or if the input has no rows or no prompts.
    """
    check_outlives_job("--output", output)
    sample = read_sample(path, StorageConfig())
    if output.exists():
        raise UserError(f"{output}: exists already, and is kept; choose another --output")
    proposal = propose(sample.columns)
    model = os.path.expanduser(model or (DEMO if Path(DEMO).is_dir() else PLACEHOLDER))
    for answers in ("answers", "../answers"):
        text = job_text(path, sample, proposal, model, answers)
        config = validated(JobConfig, parse_yaml(text), path)
        try:
            check_output_disjoint(config)
            break
        except UserError:  # the output would overlap the input; try ../answers
            if answers != "answers":
                raise
    check_columns(config)
    try:
        with open(output, "x") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
    return sample, proposal


def read_sample(path: str, storage: StorageConfig) -> Sample:
    """Read the first rows of the first file that has rows. Raises UserError if the first `FILES` files have no rows."""
    given: InputFormat | None = None
    unlisted, unread = list[UserError](), list[UserError]()
    for given in (None, "jsonl", "csv"):  # a folder's name does not show the format of its files
        try:
            files = list_files([path], storage, given)
            break
        except UserError as error:
            unlisted.append(error)
    else:
        raise unlisted[0]
    for url, entry in islice(files.items(), FILES):
        try:
            return Sample(len(files), given, first_rows(url, *entry, file_format(url, given), storage))
        except OtherFormat as error:
            return Sample(len(files), error.format, first_rows(url, *entry, error.format, storage))
        except UserError as error:
            unread.append(error)  # such as an empty file; try the next one
    raise unread[0]


def first_rows(url: str, size: int, version: str, kind: str, storage: StorageConfig) -> dict[str, list[Any]]:
    """Return column name -> values in a file's first rows. Raises UserError if none of these rows can be read."""
    names: list[str] = [""]  # a name that no column has; the first pass finds the names, the second one the types
    for _ in range(2):
        file, schema = read_layout(url, size, version, storage, kind, TextColumns(names), ROWS)
        names = schema.names
    schema = common_schema([(file, schema)], list(dict.fromkeys([*path_values(url), *names])), storage)
    shards = cut_shards([file], ROWS, SAMPLE_BYTES)[:1]
    if not shards:
        raise UserError(f"{url}: holds no rows")
    tables = [table.filter(pc.field(ERROR).is_null()) for _, table in read_shards([file], shards, schema, storage)]
    if not tables or not tables[0].num_rows:
        raise UserError(f"{url}: none of the first {ROWS} rows can be read; correct the file")
    values: dict[str, list[Any]] = tables[0].select(schema.names).to_pydict()
    return values


def true_answers(columns: Mapping[str, Sequence[Any]], choices: Collection[str] | None = None) -> str | None:
    """Return the name of a column that seems to hold true answers; None if there is none.

    choices: labels, one of which each value must be. None: the column must hold texts and have a usual name.
    """
    labels = None if choices is None else set(map(normalized, choices))

    def fits(value: Any) -> bool:
        texts = value if isinstance(value, list) else [value]
        is_text = bool(texts) and all(isinstance(text, str) for text in texts)
        return is_text and (labels is None or all(normalized(text) in labels for text in texts))

    fitting = [name for name, values in columns.items() if _all(values, fits)]
    return next(iter([*_named(fitting, ANSWERS), *(fitting if labels is not None else [])]), None)


def propose(columns: Mapping[str, Sequence[Any]]) -> Proposal:
    """Choose columns for id, prompt and labels. Raises UserError if no column can be a prompt.

    columns: column name -> sampled values, with None for each row without a value.
    """
    found = _propose_input(columns)
    for name, values in columns.items():
        labels = tuple(sorted({value for value in values if isinstance(value, str)}))
        few = 2 <= len(labels) <= LABELS and len(values) >= 3 * len(labels)
        if few and _all(values, _is_label) and not found.uses(name):
            note = f"{name} has {len(labels)} values: a comment lists them as `choices`."
            return Proposal(found.keys, [*found.notes, note], labels)
    return found


def _propose_input(columns: Mapping[str, Sequence[Any]]) -> Proposal:
    if set(columns) >= REQUEST:
        return Proposal({"format": "openai_batch"}, ["Each line is a request with a custom_id: an OpenAI batch."])
    likely = [name for name in columns if name.lower() in IDS or name.lower().endswith(("_id", "-id"))]
    likely.sort(key=lambda name: IDS.index(name.lower()) if name.lower() in IDS else 2)
    found = next((name for name in likely if _is_id(columns[name])), None)
    usual = f"No column with a usual name for ids ({', '.join(IDS)}, …_id) has a different value in each sampled row"
    keys, notes = {}, [f"{usual}: ids are made from file and row number; `id: COLUMN` uses a column."]
    if found is not None:
        keys, notes = {"id": found}, [f"{found} has a different value in each sampled row: it becomes `id`."]

    def chosen(key: str, value: str, note: str) -> Proposal:
        return Proposal({**keys, key: value}, [*notes, note])

    chats = [name for name, values in columns.items() if _all(values, _is_chat)]
    if chats:
        chat = [*_named(chats, CHATS), *chats][0]
        return chosen("messages", chat, f"{chat} holds chats: the model's template renders them.")
    texts = [name for name in columns if name != found and _all(columns[name], lambda value: isinstance(value, str))]
    asks = _named(texts, PROMPTS)
    if {"instruction", "input"} <= set(asks):
        template = "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}"  # in Alpaca's format, input may be empty
        return chosen("template", template, "instruction and input make one prompt.")
    if asks:
        return chosen("prompt", asks[0], f"{asks[0]} holds the prompts.")
    tokens = next((name for name, values in columns.items() if _all(values, _is_tokens)), None)
    if tokens is not None:
        return chosen("prompt", tokens, f"{tokens} holds prompts as token ids.")
    if not texts:
        raise UserError(
            f"no column holds text, token ids or chats ({listed(columns)}); write a job file with input.template"
        )
    named = _named(texts, TEXTS)
    text = named[0] if named else max(texts, key=lambda name: mean(len(value or "") for value in columns[name]))
    if not text.isidentifier() or keyword.iskeyword(text) or text in RESERVED:
        return chosen("prompt", text, f"{text} holds the longest texts: it is the prompt.")
    template = f"Summarize in one sentence.\n\n{{{{ {text} }}}}{SUMMARY}"
    return chosen(
        "template", template, f"{text} holds texts: the template asks for a summary of one sentence; change it."
    )


def _named(columns: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the columns whose lower-case names are in `usual`, in the order of `usual`."""
    return sorted((name for name in columns if name.lower() in usual), key=lambda name: usual.index(name.lower()))


def _is_id(values: Sequence[Any]) -> bool:
    return len(set(map(str, values))) == len(values) and all(
        isinstance(value, str | int) and len(str(value)) < LONG for value in values
    )


def _all(values: Sequence[Any], fits: Any) -> bool:
    """Return whether at least one value is not None, and all these values fit."""
    given = [value for value in values if value is not None]
    return bool(given) and all(map(fits, given))


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LABEL_LENGTH


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _is_chat(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(entry, dict) and {"role", "content"} <= set(entry) for entry in value)


def job_text(path: str, sample: Sample, proposal: Proposal, model: str, answers: str = "answers") -> str:
    """Return the text of a job file, with comments that explain the choices. answers: parent of the output folder."""
    keys = {"path": path} | ({"format": sample.format} if sample.format else {}) | proposal.keys
    is_chat = "messages" in keys or keys.get("format") == "openai_batch"
    if not is_chat and _has_chat_template(model):
        keys["chat"] = True
        try:  # set a system message, because small models repeat the one that the template may add
            check_chat(tokenizer_of(model), Chat(system=SYSTEM), model)
            keys["system"] = SYSTEM
        except UserError:
            pass
        if "template" in keys:
            keys["template"] = keys["template"].removesuffix(SUMMARY)
    names = [re.sub(r"[*?\[\]]", "", part.partition(".")[0]) for part in path.split("/")]
    name = next(filter(None, reversed(names)), Path.cwd().name)  # for a path such as *.csv, the current folder's name
    notes = "".join(f"# {printable(line)}\n" for line in (f"Columns: {listed(sample.columns)}", *proposal.notes))
    chat = "  # chat: true                      # for a model with a chat template\n"
    hint = "" if is_chat or "chat" in keys else chat
    rest = {key: one for key, one in sample.columns.items() if not proposal.uses(key)}
    right = true_answers(rest)
    looks = f"{right} seems to hold true answers; `skipdecode adapt` can use them to measure losses"
    adapt = "" if right is None else f"# adapt: {{references: {right}}}       # {looks}\n"
    edit = "  # replace it: a folder, s3://…, or a model on the hub\n" if model == PLACEHOLDER else ""
    return f"""# Written by `skipdecode init {printable(path)}`. `skipdecode keys` lists all keys.
#
# skipdecode try THIS_FILE     answers five rows, and writes nothing
# skipdecode plan THIS_FILE    predicts time and cost at each speed
# skipdecode run THIS_FILE     answers all rows; the same command resumes the job
#
# Relative paths begin in the folder in which a command runs; with `ray job submit`, in the copy that Ray uploads.

{notes}{dump_yaml({"input": keys})}{hint}{dump_yaml({"output": {"path": os.path.abspath(f"{answers}/{name}")}})}\
  # on a cluster: a folder on a disk that all nodes share, or s3://BUCKET/FOLDER
  # keep: []                        # input columns to copy to the answers
  # format: jsonl                   # also write answers.jsonl
{dump_yaml({"model": {"path": model}})}{edit}\
  # dtype: float32                  # default bfloat16
# schedule: {{speedup: 2}}            # fewer layers for later tokens; first train the model with `skipdecode adapt`
{adapt}sampling:
  max_new_tokens: 128               # maximum tokens of an answer
  temperature: 0.0                  # 0 is greedy
{_choices(proposal.labels)}
actors:
  count: 1                          # processes that hold the model
  # gpus: 1                         # GPUs of each process
# price_per_hour: 2.5               # price of a GPU, or of an actor on CPUs, for `plan`
"""


def _choices(labels: Sequence[str]) -> str:
    line = dump_yaml({"choices": list(labels or ("positive", "negative"))}).strip().replace("\n", "\n# ")
    return f"# labels; every answer is one of them:\n# {line}"


def _has_chat_template(model: str) -> bool:
    folder = Path(model)
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
