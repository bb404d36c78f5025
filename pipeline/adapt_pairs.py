"""Full-depth answers -> what tune and evaluate read: prompts and responses as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.adapt_configs import ANSWERS, HELD_OUT, SAMPLE, TRAIN
from pipeline.prepare import ERROR, PROMPT_IDS, PromptSpec, prepare_table, tokenizer_of

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
    """Rows written, and rows of the sample left out: with an error, with nothing in the answer or in the
    references. longest: tokens of the longest pair, its end token counted."""

    train: int
    held_out: int
    errors: int
    empty: int
    unreferenced: int
    longest: int


def split_end(tokens: Sequence[int], end: int | None) -> tuple[list[int], bool]:
    """The answer without its end-of-sequence token, and whether it had one.

    An answer that was cut off, or that something else has ended, keeps all its tokens and teaches no end.
    """
    ended = bool(tokens) and tokens[-1] == end
    return list(tokens[:-1] if ended else tokens), ended


def write_pairs(folder: Path, spec: PromptSpec, held_out: int, references: str | None) -> Pairs:
    """Join the sample's first `held_out` rows, and the rest, with their answers; write both files.

    spec: of the job that has answered them. references: column of the sample. Raises ValueError if too few rows
    are left.
    """
    sample = pq.read_table(folder / SAMPLE)
    prepared = prepare_table(sample, spec)
    answers = _answers(folder / ANSWERS)
    end = tokenizer_of(spec.checkpoint).eos_token_id
    given: list[Any] = sample[references].to_pylist() if references is not None else [None] * sample.num_rows
    kept: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELD_OUT: []}
    errors = empty = unreferenced = 0
    for row, (prompt, error) in enumerate(
        zip(prepared[PROMPT_IDS].to_pylist(), prepared[ERROR].to_pylist(), strict=True)
    ):
        answer = answers[row]
        if error is not None or answer["error"] is not None:
            errors += 1
            continue
        response, ended = split_end(answer["token_ids"], end)
        one = given[row]
        right = [text for text in (one if isinstance(one, list) else [one]) if text]
        if not response:
            empty += 1
        elif references is not None and row < held_out and not right:
            unreferenced += 1
        else:
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
            raise ValueError(
                f"{folder}: {len(kept[name])} rows left {what}: of {sample.num_rows} answered at full depth {errors} "
                f"have an error, {empty} are empty, {unreferenced} have no reference; raise adapt.rows, or look into "
                f"{folder / ANSWERS}"
            )
    for name, rows in kept.items():
        temporary = folder / f"{name}.tmp"
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary)
        temporary.replace(folder / name)
    longest = max(
        len(row["prompt"]) + len(row["response"]) + int(row["ended"]) for rows in kept.values() for row in rows
    )
    return Pairs(len(kept[TRAIN]), len(kept[HELD_OUT]), errors, empty, unreferenced, longest)


def to_dict(pairs: Pairs) -> dict[str, Any]:
    """For the record."""
    return asdict(pairs)


def _answers(folder: Path) -> dict[int, dict[str, Any]]:
    """First answer of each row of the sample, by its number, which ends the ids that the job has made."""
    columns = ["id", "sample_index", "generated_text", "token_ids", "error"]
    rows = pa.concat_tables(
        pq.read_table(path, columns=columns) for path in sorted(folder.glob("part-*.parquet"))
    ).to_pylist()
    return {int(row["id"].rsplit(":", 1)[1]): row for row in rows if row["sample_index"] == 0}
