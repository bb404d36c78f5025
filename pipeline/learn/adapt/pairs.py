"""Joins the sample with its answers: pairs to train on, and held-out rows to score."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.config.adapt import OF_TEXTS, AdaptConfig
from pipeline.config.forms import normalized
from pipeline.learn.adapt.task import ANSWERS, DEV, HELD_OUT, SAMPLE, TRAIN
from pipeline.learn.rows import prompt_ids, usable_references
from pipeline.learn.score.metrics import default_metric, is_label
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.storage.local_output import replacing
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
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


def write_pairs(
    folder: Path, spec: PromptSpec, held_out: int, options: AdaptConfig, choices: Sequence[str] | None
) -> dict[str, int]:
    """Join the sample with its answers, and write the held-out rows, the training rows and the dev rows.

    Returns the numbers of written rows (`train`, `dev`, `held_out`), the numbers of rows left out (`errors`; `empty`:
    empty answers; `unreferenced`: held-out rows without a usable reference; `repeated`: training rows with a held-out
    row's prompt). Raises UserError if too few rows are left.

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
        usable = usable_references(values[row], labels)
        pair = {"prompt": prompt, "response": response, "ended": ended, "text": text, "references": usable}
        if prompt is None or max(response, default=0) >= spec.vocab_size:
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
    watching = min(DEV_ROWS, int(DEV_SHARE * len(kept[TRAIN])))
    if watching >= 2:
        kept[DEV], kept[TRAIN] = kept[TRAIN][:watching], kept[TRAIN][watching:]
    for name, rows in kept.items():
        with replacing(folder / name) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary)
    written = {"train": len(kept[TRAIN]), "dev": len(kept.get(DEV, [])), "held_out": len(kept[HELD_OUT])}
    return {**written, **left_out}


def read_pairs(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_pairs` wrote; no rows if there is no such file."""
    path = folder / name
    return read_parquet(path.read_bytes()).to_pylist() if path.exists() else []


def training_pairs(rows: Sequence[dict[str, Any]], end: int | None, most: int) -> list[dict[str, Any]]:
    """Return the rows as pairs for `train`. Leave out pairs of more than `most` tokens, with a warning.

    end: token that is added to a response that has ended.
    """
    pairs: list[dict[str, Any]] = [
        {
            "input_ids": [*row["prompt"], *row["response"], *([end] if row["ended"] else [])],
            "prompt_tokens": len(row["prompt"]),
        }
        for row in rows
    ]
    fitting = [pair for pair in pairs if len(pair["input_ids"]) <= most]
    if len(fitting) < len(pairs):
        left_out = len(pairs) - len(fitting)
        log.warning("%d of %d pairs are longer than %d tokens and are left out", left_out, len(pairs), most)
    return fitting


def metric_of(rows: Sequence[dict[str, Any]], asked: str | None, *, choices: bool, references: bool) -> str:
    """Return the metric `asked`, or the default metric for the job's held-out rows if `asked` is None.

    choices, references: whether the job has choices, or references. Raises UserError if `asked` is a metric for texts,
    but the references in the rows are labels.
    """
    texts = [row["references"] for row in rows]
    if asked in OF_TEXTS and not choices and all(is_label(text) for row in texts for text in row):
        raise UserError(
            f"adapt.metric: {asked} is not a metric for labels, and the references of all {len(texts)} held-out rows "
            "are labels (single words); use exact_match"
        )
    return asked or default_metric(
        texts if references else None, [len(row["response"]) for row in rows], choices=choices
    )


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the first answer of each row, by row number in the sample. An answer's id ends with this number."""
    columns = ["id", "sample_index", "generated_text", "token_ids", "error"]
    parts = [read_parquet(path.read_bytes(), columns) for path in sorted(folder.glob("part-*.parquet"))]
    rows = pa.concat_tables(parts).to_pylist()
    return {int(row["id"].rsplit(":", 1)[1]): row for row in rows if row["sample_index"] == 0}
