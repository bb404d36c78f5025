"""A part of scores: its columns and its table. Imports no ray."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from actors.scored_rows import ScoredRow
from pipeline.generate.output import PartSpec, carried_columns

_PLAIN = [
    pa.field("continuation_tokens", pa.int32()),
    pa.field("cumulative_logprob", pa.float64()),
    pa.field("token_logprobs", pa.list_(pa.float64())),
    pa.field("perplexity", pa.float64()),
    pa.field("is_greedy", pa.bool_()),
    pa.field("mean_depth", pa.float64()),
]
_TOKEN_IDS = pa.field("token_ids", pa.list_(pa.int32()))


def score_fields(*, many: bool, token_ids: bool) -> list[pa.Field]:
    """The columns of scores. many: a row has a list of each, one for each of its texts. token_ids: whether they are
    among them."""
    fields = [*_PLAIN, *([_TOKEN_IDS] if token_ids else [])]
    own = [field.with_type(pa.list_(field.type)) if many else field for field in fields]
    return [pa.field("prompt_tokens", pa.int32()), *own, pa.field("error", pa.string())]


def score_table(rows: pa.Table, scored: Sequence[ScoredRow], spec: PartSpec, url: str, first_row: int) -> pa.Table:
    """Output rows of a shard: id, kept columns, scores. Arguments as in `part_table`, scored: one for each row."""
    assert spec.scored is not None and [row.row for row in scored] == list(range(rows.num_rows))
    columns = carried_columns(rows, spec, url, first_row)
    values = [row.values(many=spec.scored) for row in scored]
    for field in score_fields(many=spec.scored, token_ids="token_ids" in spec.optional):
        own = [getattr(row, field.name) for row in scored] if field.name in ("prompt_tokens", "error") else None
        columns[field.name] = pa.array([value[field.name] for value in values] if own is None else own, field.type)
    return pa.table(columns)
