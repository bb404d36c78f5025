"""Splits E2E's training prompts in two: one half trains a plain model, the other is a corpus without answers.

    .venv/bin/python tests/benchmarks/e2e_halves.py [../shared/data/e2e/train.parquet] [work/evidence/halves]

A prompt and all its references go to one side, by the first bit of the prompt's SHA-256. The second half's
references are kept only to score with; `adapt` does not read them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(source: str = "../shared/data/e2e/train.parquet", folder: str = "work/evidence/halves") -> None:
    """Write pairs.parquet (prompt, reference) and corpus/prompts.parquet (id, prompt, references)."""
    table = pq.read_table(source)
    pairs: dict[str, list[str]] = {}
    corpus: dict[str, list[str]] = {}
    for prompt, reference in zip(table["prompt"].to_pylist(), table["reference"].to_pylist(), strict=True):
        side = pairs if hashlib.sha256(prompt.encode()).digest()[0] % 2 == 0 else corpus
        side.setdefault(prompt, []).append(reference)
    (Path(folder) / "corpus").mkdir(parents=True, exist_ok=True)
    flat = [(prompt, reference) for prompt, given in pairs.items() for reference in given]
    names = ["prompt", "reference"]
    pq.write_table(pa.table(dict(zip(names, zip(*flat, strict=True), strict=True))), Path(folder) / "pairs.parquet")
    rows = {
        "id": [f"e2e-{number:05d}" for number in range(len(corpus))],
        "prompt": list(corpus),
        "references": list(corpus.values()),
    }
    pq.write_table(pa.table(rows), Path(folder) / "corpus" / "prompts.parquet")
    print(f"{folder}: {len(flat):,} pairs of {len(pairs):,} prompts; {len(corpus):,} prompts without answers")


if __name__ == "__main__":
    main(*sys.argv[1:])
