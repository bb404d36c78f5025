"""Full-depth answers -> what tune and evaluate read: prompts and responses as token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.adapt.configs import ANSWERS, HELD_OUT, SAMPLE, TRAIN
from pipeline.config.adapt import OF_TEXTS
from pipeline.config.labels import normalized
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, prepare_table
from pipeline.prepare.spec import PromptSpec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.storage.owned_folder import replacing

SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.int32())),
        ("response", pa.list_(pa.int32())),
        ("ended", pa.bool_()),
        ("text", pa.string()),
        ("references", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Pairs:
    """Rows written, and rows of the sample left out.

    errors, empty: with an error, with nothing in the answer. unreferenced: held-out ones without a reference, with
    choices without one that is a label. repeated: training ones with the prompt of a held-out one, whose score
    would be of what was learned by heart. longest: tokens of the longest pair, its end token counted.
    """

    train: int
    held_out: int
    errors: int
    empty: int
    unreferenced: int
    repeated: int
    longest: int


def split_end(tokens: Sequence[int], end: int | None) -> tuple[list[int], bool]:
    """The answer without its end-of-sequence token, and whether it had one.

    An answer that was cut off, or that something else has ended, keeps all its tokens and teaches no end.
    """
    ended = bool(tokens) and tokens[-1] == end
    return list(tokens[:-1] if ended else tokens), ended


def write_pairs(
    folder: Path, spec: PromptSpec, held_out: int, references: str | None, choices: Sequence[str] | None
) -> Pairs:
    """Join the sample's first `held_out` rows, and the rest, with their answers; write both files.

    spec: of the job that has answered them. references: column of the sample. choices: what a reference must be one
    of. Raises ValueError if too few rows are left.
    """
    sample = pq.read_table(folder / SAMPLE)
    prepared = prepare_table(sample, spec)
    answers = _answers(folder / ANSWERS)
    end = tokenizer_of(spec.checkpoint).eos_token_id
    given: list[Any] = sample[references].to_pylist() if references is not None else [None] * sample.num_rows
    kept: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELD_OUT: []}
    labels = None if choices is None else {normalized(label) for label in choices}
    evaluated: set[tuple[int, ...]] = set()  # prompts of held-out rows, which come first
    errors = empty = unreferenced = repeated = 0
    for row, (prompt, error) in enumerate(
        zip(prepared[PROMPT_IDS].to_pylist(), prepared[ERROR].to_pylist(), strict=True)
    ):
        answer = answers[row]
        if error is not None or answer["error"] is not None:
            errors += 1
            continue
        response, ended = split_end(answer["token_ids"], end)
        right = _right(given[row], labels)
        if not response:
            empty += 1
        elif references is not None and row < held_out and not right:
            unreferenced += 1
        elif row >= held_out and tuple(prompt) in evaluated:
            repeated += 1
        else:
            if row < held_out:
                evaluated.add(tuple(prompt))
            kept[HELD_OUT if row < held_out else TRAIN].append(
                {
                    "prompt": prompt,
                    "response": response,
                    "ended": ended,
                    "text": answer["generated_text"],
                    "references": right,
                }
            )
    for name, least, what in ((HELD_OUT, 2, "to evaluate"), (TRAIN, 1, "to train on")):
        if len(kept[name]) < least:
            raise UserError(
                f"{folder}: {len(kept[name])} rows left {what}: of {sample.num_rows} answered at full depth {errors} "
                f"have an error, {empty} are empty, {unreferenced} have no reference, {repeated} have a held-out row's "
                f"prompt; raise adapt.rows, or look into {folder / ANSWERS}"
            )
    for name, rows in kept.items():
        with replacing(folder / name) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary)
    longest = max(
        len(row["prompt"]) + len(row["response"]) + int(row["ended"]) for rows in kept.values() for row in rows
    )
    return Pairs(len(kept[TRAIN]), len(kept[HELD_OUT]), errors, empty, unreferenced, repeated, longest)


def check_metric(folder: Path, metric: str) -> None:
    """ValueError if the held-out references are labels, one word each, and `metric` is one of texts."""
    if metric not in OF_TEXTS:
        return
    rows = pq.read_table(folder / HELD_OUT, columns=["references"])["references"].to_pylist()
    if all(len(text.split()) == 1 for row in rows for text in row):
        raise UserError(
            f"adapt.metric: {metric} is not for labels, and every reference of the {len(rows)} held-out rows is one "
            "word; take exact_match"
        )


def _right(given: Any, labels: Collection[str] | None) -> list[str]:
    """The references of a row that it can be scored by: text, with labels one of them."""
    texts = [text for text in (given if isinstance(given, list) else [given]) if text and text.strip()]
    return texts if labels is None else [text for text in texts if normalized(text) in labels]


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    """First answer of each row of the sample, by its number, which ends the ids that the job has made."""
    columns = ["id", "sample_index", "generated_text", "token_ids", "error"]
    rows = pa.concat_tables(
        pq.read_table(path, columns=columns) for path in sorted(folder.glob("part-*.parquet"))
    ).to_pylist()
    return {int(row["id"].rsplit(":", 1)[1]): row for row in rows if row["sample_index"] == 0}
