"""Labels as JSON by a published model: Banking77's questions with a JSON Schema, and without.

    .venv/bin/python tests/benchmarks/json_labels.py [--rows 200]

Each question comes after its six most similar training questions, whose answers are objects with a topic and an intent.
Prints, for both jobs, the share of answers that are objects of the schema, and of right topics and intents. Without the
data sets it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from real_data import DATA, JOBS, TOPICS, WORK, read, topic_of, with_examples
from real_model import command, make_model
from rich.console import Console
from rich.table import Table

FOLDER = WORK / "json-labels"
JOB = JOBS / "json-labels.yaml"


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help="questions")
    rows = parser.parse_args().rows
    if not DATA.is_dir():
        print(f"skipped: the data sets are not in {DATA}", file=sys.stderr)
        return
    make_model()
    intents = sorted({row["label"] for row in read("banking77/train")})
    write_questions(rows)
    schema = {
        "type": "object",
        "properties": {"topic": {"enum": list(TOPICS)}, "intent": {"enum": intents}},
        "required": ["topic", "intent"],
        "additionalProperties": False,
    }
    job = yaml.safe_load(JOB.read_text()) | {"output_format": {"json_schema": schema}}
    free = {key: value for key, value in job.items() if key != "output_format"}
    free["output"] = {**job["output"], "path": str(FOLDER / "free"), "parse": False}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "objects of\nthe schema", "topic\nright", "intent\nright", "answer\ntokens", "generate\nseconds"):
        table.add_column(title, justify="right")
    for name, values in (("with the schema", job), ("without", free)):
        file = FOLDER / f"{name.replace(' ', '-')}.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        command("run", str(file))
        table.add_row(name, *_row(Path(values["output"]["path"]), intents))
    Console(width=120, highlight=False).print(table)


def write_questions(count: int) -> None:
    """The first questions of the shuffled test set with their examples."""

    def answer(intent: str) -> str:
        return json.dumps({"topic": topic_of(intent), "intent": intent})

    _, asked = with_examples(answer)
    rows = []
    for row in asked[:count]:
        right = json.loads(row["references"][0])
        rows.append({"id": row["id"], "messages": row["messages"], "topic": right["topic"], "intent": right["intent"]})
    FOLDER.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), FOLDER / "questions.parquet")


def _row(output: Path, intents: list[str]) -> list[str]:
    """A job's cells of the table."""
    rows = pq.read_table(sorted(output.glob("part-*.parquet"))).to_pylist()
    found = [_object(row["generated_text"]) for row in rows]
    valid = [one if one.keys() == {"topic", "intent"} and one["topic"] in TOPICS and one["intent"] in intents else {}
             for one in found]  # fmt: skip
    summary = json.loads((output / "_job" / "summary.json").read_text())
    right = [sum(one.get(key) == row[key] for one, row in zip(valid, rows, strict=True)) for key in ("topic", "intent")]
    shares = [f"{100 * count / len(rows):.1f}%" for count in (sum(map(bool, valid)), *right)]
    return [*shares, f"{summary['generated_tokens'] / len(rows):.1f}", f"{summary['generate_seconds']:.0f}"]


def _object(text: str | None) -> dict[str, Any]:
    """The object in an answer; empty if there is none."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    main()
