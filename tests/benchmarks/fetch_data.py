"""Fetch the data sets that benchmarks and tests read into ../shared/data: E2E NLG, Banking77 and QMSum.

    .venv/bin/python tests/benchmarks/fetch_data.py [--data ../shared/data] [--source https://github.com]

Each comes as GitHub's archive of a fixed commit and becomes Parquet files with the columns id, prompt, references
(train: reference) and, of Banking77, label. raw/rows.json names the rows that the published figures were measured on,
and only these are written. The program keeps a file that exists.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage.local_output import replacing

MEASURED = json.loads(Path(__file__).with_name("raw").joinpath("rows.json").read_text())
GENERAL_WORDS = 1500  # about so many words of a meeting stand in the prompt of a general query of QMSum

Rows = list[dict[str, Any]]
Files = dict[str, bytes]  # of an archive, by path below its top folder


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--source", default="https://github.com", help="where the archives lie")
    given = parser.parse_args()
    for name, (repository, commit, convert) in SETS.items():
        url = f"{given.source}/{repository}/archive/{commit}.tar.gz"
        print(f"{name}: {url}", flush=True)
        write(given.data / name, convert(fetched(url)))


def fetched(url: str) -> Files:
    """Return the files of an archive."""
    with urllib.request.urlopen(url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
        return {
            member.name.partition("/")[2]: opened.read()
            for member in archive
            if (opened := archive.extractfile(member)) is not None
        }


def write(folder: Path, files: dict[str, Rows | bytes]) -> None:
    """Write files that are not in a folder yet: rows as Parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if path.exists():
            print(f"{path}: exists, kept")
            continue
        with replacing(path) as temporary:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                pq.write_table(pa.Table.from_pylist(content), temporary, compression="zstd")
                print(f"{path}: {len(content):,} rows")


def lines(files: Files, path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header."""
    return list(csv.DictReader(io.StringIO(files[path].decode("utf-8-sig"), newline="")))


def measured(split: str, rows: Rows) -> Rows:
    """Return the rows whose bit, counted from the lowest, is set in rows.json."""
    bits = int.from_bytes(base64.b64decode(MEASURED[split]), "little")
    return [row for number, row in enumerate(rows) if bits >> number & 1]


def e2e(files: Files) -> dict[str, Rows | bytes]:
    """Train has a row for each text; dev and test one for each meaning representation, with all of its texts."""
    train = [
        {"id": f"e2e-train-{number:05d}", "prompt": line["mr"], "reference": line["ref"]}
        for number, line in enumerate(lines(files, "trainset.csv"))
    ]
    grouped: dict[str, Rows] = {}
    for split, path in (("dev", "devset.csv"), ("test", "testset_w_refs.csv")):
        texts: dict[str, list[str]] = {}
        for line in lines(files, path):
            texts.setdefault(line["mr"], []).append(line["ref"])
        grouped[split] = [
            {"id": f"e2e-{split}-{number:04d}", "prompt": prompt, "references": references}
            for number, (prompt, references) in enumerate(texts.items())
        ]
    return {
        "train.parquet": train,
        "dev.parquet": grouped["dev"],
        "test.parquet": measured("e2e-test", grouped["test"]),
    }


def banking77(files: Files) -> dict[str, Rows | bytes]:
    """Give each question its label, also as its reference."""
    train, test = (lines(files, f"banking_data/{split}.csv") for split in ("train", "test"))
    known: Rows = [
        {
            "id": f"banking77-train-{number:05d}",
            "prompt": line["text"],
            "reference": line["category"],
            "label": line["category"],
        }
        for number, line in enumerate(train)
    ]
    asked: Rows = [
        {
            "id": f"banking77-test-{number:04d}",
            "prompt": line["text"],
            "references": [line["category"]],
            "label": line["category"],
        }
        for number, line in enumerate(test)
    ]
    return {
        "train.parquet": measured("banking77-train", known),
        "test.parquet": measured("banking77-test", asked),
        "categories.json": files["banking_data/categories.json"],
    }


def qmsum(files: Files) -> dict[str, Rows | bytes]:
    """Give each query the turns that it is about; a general query the start of its meeting."""
    rows: dict[str, Rows] = {"train": [], "dev": [], "test": []}
    for split, folder in zip(rows, ("train", "val", "test"), strict=True):
        for path in sorted(path for path in files if path.startswith(f"data/ALL/{folder}/")):
            name, meeting = Path(path).stem, json.loads(files[path])
            queries = {str(number): one for number, one in enumerate(meeting["specific_query_list"])}
            queries |= {f"g{number}": one for number, one in enumerate(meeting["general_query_list"])}
            for number, one in queries.items():
                if split == "test" and number not in MEASURED["qmsum-test"].get(name, ()):
                    continue
                prompt = "\n".join([one["query"].strip(), *turns(meeting["meeting_transcripts"], one)])
                answer = one["answer"].strip()
                reference = {"reference": answer} if split == "train" else {"references": [answer]}
                rows[split].append({"id": f"qmsum-{split}-{name}-{number}", "prompt": prompt, **reference})
    return {f"{split}.parquet": found for split, found in rows.items()}


def turns(transcript: list[dict[str, str]], query: dict[str, Any]) -> list[str]:
    """Return the turns of a query's spans, or those up to the boundary nearest to GENERAL_WORDS."""
    spans = query.get("relevant_text_span")
    chosen = {turn for first, last in spans or () for turn in range(int(first), int(last) + 1)}
    found, words = list[str](), 0
    for number, turn in enumerate(transcript):
        text = turn["content"].strip()
        if not text or (spans is not None and number not in chosen):
            continue
        line = f"{turn['speaker'].strip()}: {text}"
        longer = words + len(line.split())
        if spans is None and longer - GENERAL_WORDS >= GENERAL_WORDS - words:
            break
        found.append(line)
        words = longer
    return found


SETS: dict[str, tuple[str, str, Callable[[Files], dict[str, Rows | bytes]]]] = {
    "e2e": ("tuetschek/e2e-dataset", "ab0d967dd5729ce455ef14ba9ffafc456a335264", e2e),
    "banking77": ("PolyAI-LDN/task-specific-datasets", "57ec275d8078af65b7731c2a98be812d844a6d6b", banking77),
    "qmsum": ("Yale-LILY/QMSum", "83d7768c1f2b4dfeb091385d3dc7e239b8e5bb7e", qmsum),
}


if __name__ == "__main__":
    main()
