"""Draws rows from a job's input, and writes their prompts and full-depth answers as files for tune and evaluate."""

from __future__ import annotations

import logging
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.config.adapt import OF_TEXTS, SHORT, AdaptConfig
from pipeline.config.forms import normalized
from pipeline.config.job import JobConfig
from pipeline.input.files import Files, InputFile
from pipeline.input.rows import from_ipc, read_shards, to_ipc
from pipeline.input.schema import is_text
from pipeline.input.shards import Shard
from pipeline.learn.adapt.configs import ANSWERS, DEV, HELD_OUT, SAMPLE, TRAIN
from pipeline.learn.evaluate.metrics import is_label
from pipeline.plan.manifest import read_footers
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.storage.owned_folder import replacing
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
SEED = 0  # random seed with which rows are drawn
DEV_ROWS, DEV_SHARE = 64, 0.1  # the dev set is this share of the rows drawn for training, up to 64 rows
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.int32())),
        ("response", pa.list_(pa.int32())),
        ("ended", pa.bool_()),
        ("text", pa.string()),
        ("references", pa.list_(pa.string())),
    ]
)


def draw(total: int, count: int) -> list[int]:
    """Draw `count` distinct numbers below `total` in random order, or all of them if there are fewer."""
    return random.Random(SEED).sample(range(total), min(count, total))


def layout(config: JobConfig, listed: Files) -> tuple[list[InputFile], pa.Schema]:
    """Return the input files and the schema of the columns to read: the job's columns, and those that `adapt` names.

    Raises UserError if a file cannot be read, or a column is missing or has the wrong type.
    """
    assert config.adapt is not None
    named = {"references": config.adapt.references, "responses": config.adapt.responses}
    columns = {key: name for key, name in named.items() if name is not None}
    output = config.output.model_copy(update={"keep": list(dict.fromkeys(columns.values()))})
    files, schema = read_footers(config.model_copy(update={"output": output}), listed)
    for key, name in columns.items():
        kind = schema.field(name).type
        is_list = key == "references" and isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        if not is_text(kind.value_type if is_list else kind):
            lists = ", or a list of strings" if key == "references" else ""
            raise UserError(f"adapt.{key}: column {name!r} is {kind}; it must be string{lists}")
    return files, schema


def read_sample(
    config: JobConfig, files: Sequence[InputFile], schema: pa.Schema, drawn: Sequence[int]
) -> tuple[pa.Table, list[bool]]:
    """Read rows. Return a table of the readable rows, in the order of `drawn`, and whether each row is readable.

    drawn: numbers of the rows to read, counted across all files. Only row groups with such a row are read.
    """
    in_order, ends = sorted(drawn), accumulate((file.rows for file in files), initial=0)
    single_rows = [
        Shard(row, file.url, row - first, 1)
        for file, (first, end) in zip(files, pairwise(ends), strict=True)
        for row in in_order[bisect_left(in_order, first) : bisect_left(in_order, end)]
    ]
    rows = {  # copied by way of IPC, because a slice would keep its whole batch in memory
        shard.index: from_ipc(to_ipc(table)) for shard, table in read_shards(files, single_rows, schema, config.storage)
    }
    readable = [rows[row][ERROR][0].as_py() is None for row in drawn]
    good = [rows[row].drop_columns(ERROR) for row, is_good in zip(drawn, readable, strict=True) if is_good]
    return pa.concat_tables([schema.empty_table(), *good]).combine_chunks(), readable


def write_pairs(
    folder: Path, spec: PromptSpec, held_out: int, options: AdaptConfig, choices: Sequence[str] | None
) -> dict[str, int]:
    """Join the sample with its answers, and write the held-out rows, the training rows and the dev rows.

    Returns the numbers of written rows (`train`, `dev`, `held_out`), the numbers of rows left out (`errors`; `empty`:
    empty answers; `unreferenced`: held-out rows without a usable reference; `repeated`: training rows with a held-out
    row's prompt), and `longest`, the tokens of the longest pair. Raises UserError if too few rows are left.

    held_out: number of rows at the start of the sample that are held out. choices: labels; references that are not
    labels are ignored.
    """
    sample, answers = read_parquet((folder / SAMPLE).read_bytes()), _answers(folder / ANSWERS)
    failed = {row: answer["error"] for row, answer in answers.items() if answer["error"] is not None}
    if failed:
        row, error = next(iter(failed.items()))
        log.warning("%d rows of the sample have an error and are left out; in row %d: %s", len(failed), row, error)
    answered = [row for row in range(sample.num_rows) if row not in failed]
    prompts = dict(zip(answered, prompt_ids(sample.take(answered), spec), strict=True))
    tokenizer, references, responses = tokenizer_of(spec.checkpoint), options.references, options.responses
    values: list[Any] = sample[references].to_pylist() if references is not None else [None] * sample.num_rows
    labels = None if choices is None else {normalized(label) for label in choices}
    kept: dict[str, list[dict[str, Any]]] = {HELD_OUT: [], TRAIN: []}
    left_out = Counter(errors=len(failed), empty=0, unreferenced=0, repeated=0)
    evaluated: set[tuple[int, ...]] = set()  # prompts of the held-out rows, which come first in the sample
    for row, prompt in prompts.items():
        if row in answers:
            response, text = answers[row]["token_ids"], answers[row]["generated_text"]
            ended = response[-1:] == [tokenizer.eos_token_id]
            response = response[:-1] if ended else response  # the training adds an end token if `ended`
        else:  # a training row, whose answer is in the column `responses`
            text, ended = sample[responses][row].as_py() or "", True
            response = tokenizer(text, add_special_tokens=False)["input_ids"]
        usable = _usable_references(values[row], labels)
        pair = {"prompt": prompt, "response": response, "ended": ended, "text": text, "references": usable}
        if prompt is None:
            left_out["errors"] += 1
        elif not response:
            left_out["empty"] += 1
        elif row >= held_out and tuple(prompt) in evaluated:
            left_out["repeated"] += 1  # a held-out prompt must not be trained on
        elif row >= held_out:
            kept[TRAIN].append(pair)
        elif references is not None and not usable:
            left_out["unreferenced"] += 1
        else:
            evaluated.add(tuple(prompt))
            kept[HELD_OUT].append(pair)
    for name, least, purpose in ((HELD_OUT, 2, "to evaluate"), (TRAIN, 1, "to train on")):
        if len(kept[name]) < least:
            raise UserError(
                f"{folder}: {len(kept[name])} rows are left {purpose}. Of the {sample.num_rows} in the sample, "
                f"{left_out['errors']} have an error, {left_out['empty']} have an empty answer, "
                f"{left_out['unreferenced']} have no reference, {left_out['repeated']} repeat a held-out prompt; "
                f"raise adapt.rows, or look at {folder / ANSWERS}"
            )
    pairs = [*kept[TRAIN], *kept[HELD_OUT]]
    watching = min(DEV_ROWS, int(DEV_SHARE * len(kept[TRAIN])))
    if watching >= 2:
        kept[DEV], kept[TRAIN] = kept[TRAIN][:watching], kept[TRAIN][watching:]
    for name, rows in kept.items():
        with replacing(folder / name) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary)
    longest = max(len(pair["prompt"]) + len(pair["response"]) + int(pair["ended"]) for pair in pairs)
    written = {"train": len(kept[TRAIN]), "dev": len(kept.get(DEV, [])), "held_out": len(kept[HELD_OUT])}
    return {**written, **left_out, "longest": longest}


def prompt_ids(table: pa.Table, spec: PromptSpec) -> list[list[int] | None]:
    """Return the token ids of each row's prompt; None for a row with an error."""
    return [ids or None for ids in prepare_table(table, spec)[PROMPT_IDS].to_pylist()]  # only errors give no ids


def metric_of(folder: Path, asked: str | None, *, choices: bool, references: bool) -> str:
    """Return the metric `asked`, or the default metric for the job's held-out rows if `asked` is None.

    choices, references: whether the job has choices, or references. Raises UserError if `asked` is a metric for texts,
    but the references in the rows are labels.
    """
    table = read_parquet((folder / HELD_OUT).read_bytes(), ["references", "response"])
    texts = table["references"].to_pylist()
    labels = all(is_label(text) for row in texts for text in row)
    if asked in OF_TEXTS and labels and not choices:
        raise UserError(
            f"adapt.metric: {asked} is not a metric for labels, and the references of all {len(texts)} held-out rows "
            "are labels (single words); use exact_match"
        )
    if asked is not None:
        return asked
    if not references:
        short = median(map(len, table["response"].to_pylist())) <= SHORT
        return "agreement_exact" if choices or short else "fidelity"
    if choices or labels:
        return "exact_match"
    return "bleu" if any(len(row) > 1 for row in texts) else "rouge_l"


def _usable_references(value: Any, labels: Collection[str] | None) -> list[str]:
    """Return the references in `value` that are not blank, and are in `labels` if `labels` is given."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if text and text.strip()]
    return texts if labels is None else [text for text in texts if normalized(text) in labels]


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the first answer of each row, by row number in the sample. An answer's id ends with this number."""
    columns = ["id", "sample_index", "generated_text", "token_ids", "error"]
    parts = [read_parquet(path.read_bytes(), columns) for path in sorted(folder.glob("part-*.parquet"))]
    rows = pa.concat_tables(parts).to_pylist()
    return {int(row["id"].rsplit(":", 1)[1]): row for row in rows if row["sample_index"] == 0}
