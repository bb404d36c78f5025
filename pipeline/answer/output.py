"""Makes the table and the Parquet bytes of a part (the output file of one shard). Does not import Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from actors.answers import Answer, answer_columns
from pipeline.input.shards import Shard
from pipeline.storage.parquet import parquet_bytes


@dataclass(frozen=True)
class PartSpec:
    """Describes what a part (the output file of one shard) holds."""

    id_column: str | None  # input column copied to `id`; None: `id` is the file's path below `root` with the row number
    keep: tuple[str, ...]  # input columns to copy besides the id
    optional: tuple[str, ...]  # names of optional answer columns, see `answer_types`
    fingerprint: str  # fingerprint of the job, for the footer
    num_layers: int  # number of layers of the model, for the footer
    root: str  # folder of all input files


def row_ids(rows: pa.Table, id_column: str | None, root: str, shard: Shard) -> pa.Array | pa.ChunkedArray:
    """Return the ids of a shard's rows: values of the id column, else file and row number. root: see `PartSpec`."""
    if id_column is not None:
        return rows[id_column]
    name = shard.url.removeprefix(f"{root}/")
    return pa.array([f"{name}:{shard.first_row + row}" for row in range(rows.num_rows)], pa.string())


def part_table(rows: pa.Table, answers: Sequence[Answer], spec: PartSpec, shard: Shard) -> pa.Table:
    """Return a shard's output table: ids, kept columns and answer columns, with one row for each answer.

    answers: answers to all rows, sorted by row and sample index.
    """
    columns = {"id": row_ids(rows, spec.id_column, spec.root, shard)}
    columns |= {name: rows[name] for name in spec.keep if name != "id"}
    owners = [answer.row for answer in answers]
    if owners != list(range(rows.num_rows)):
        columns = {name: column.take(pa.array(owners, pa.int64())) for name, column in columns.items()}
    columns |= answer_columns(answers, spec.optional)
    return pa.table(columns)


def part_bytes(table: pa.Table, spec: PartSpec, shard: Shard) -> bytes:
    """Return a part as Parquet bytes. The footer names job, shard, input file and first row."""
    metadata = {
        "skipdecode.fingerprint": spec.fingerprint,
        **shard_metadata(shard),
        "skipdecode.num_layers": str(spec.num_layers),
    }
    combined = table.replace_schema_metadata(metadata).combine_chunks()  # Parquet pages must not depend on row batches
    return parquet_bytes(combined, compression="zstd", write_page_checksum=True)


def shard_metadata(shard: Shard) -> dict[str, str]:
    """Return the entries of a part's footer that identify its shard."""
    return {
        "skipdecode.shard": str(shard.index),
        "skipdecode.file": shard.url,
        "skipdecode.first_row": str(shard.first_row),
    }
