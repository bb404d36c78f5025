"""Put the most similar labelled tickets before each ticket, the most similar one last, by the words that they share.

KNOWN.csv has the columns text and label; TICKETS.csv text, and to score the answers truth, which the job keeps.

python configs/recipes/labels/nearest.py KNOWN.csv TICKETS.csv OUT.parquet
python configs/recipes/labels/nearest.py ANSWERS
"""

import csv
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(known_file: str, tickets_file: str, out: str, examples: int = 8) -> None:
    """Write the chats."""
    known, tickets = (list(csv.DictReader(Path(file).read_text().splitlines())) for file in (known_file, tickets_file))
    words = [set(re.findall(r"\w+", row["text"].lower())) for row in known]
    *labels, last = dict.fromkeys(row["label"] for row in known)
    system = {"role": "system", "content": f"Name the topic of the ticket: {', '.join(labels)} or {last}."}
    rarity = {word: math.log(len(words) / count) for word, count in Counter(w for one in words for w in one).items()}
    for ticket in tickets:
        own = set(re.findall(r"\w+", ticket["text"].lower()))
        order = sorted(range(len(known)), key=lambda row: sum(rarity[word] for word in own & words[row]))
        shots = [known[row] for row in order[-examples:]]
        chat = [system]
        for shot in shots:
            chat += [{"role": "user", "content": shot["text"]}, {"role": "assistant", "content": shot["label"]}]
        ticket["messages"] = [*chat, {"role": "user", "content": ticket["text"]}]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(tickets), out)


def score(folder: str) -> None:
    """Print how many answers are the truth."""
    rows = pq.read_table(sorted(Path(folder).glob("part-*.parquet"))).to_pylist()
    print(f"{sum(row['generated_text'] == row['truth'] for row in rows)} of {len(rows)} right")


if __name__ == "__main__":
    (score if len(sys.argv) == 2 else main)(*sys.argv[1:])
