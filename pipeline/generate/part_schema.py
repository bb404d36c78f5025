"""Columns of a part before any row is answered."""

from __future__ import annotations

import pyarrow as pa

from pipeline.generate.output import PartSpec, part_table
from pipeline.generate.score_output import score_table


def part_schema(rows: pa.Schema, spec: PartSpec) -> pa.Schema:
    """Columns of a part over input rows of this schema, of answers or of scores."""
    to_table = part_table if spec.scored is None else score_table
    return to_table(rows.empty_table(), [], spec, "", 0).schema
