"""The slot error rate of restaurants' descriptions: values missing, wrong or added, over all values of the prompts.

    .venv/bin/python tests/benchmarks/restaurant_slots.py ANSWERS [ANSWERS ...]

ANSWERS: the output of a job over prompts such as `make demo`'s, or a file of answers that `evaluate` has written; a
line for each; `make evidence-slots` runs the demo's job at each speed and scores it.
The measure is that of the E2E task (Dušek, Novikova, Rieser 2020, arXiv:1901.07931), the patterns are our own: a value
counts as stated where the text has it in one of a few literal forms; `restaurant` without eatType[restaurant] counts as
added. A slot whose value is missing and that has another one is wrong, once.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.advise.demo_data import NAMES, OPTIONAL_SLOTS

PLACES = sorted({*NAMES, *OPTIONAL_SLOTS["near"]}, key=len, reverse=True)  # a longer one may hold a shorter one
_RATED = r"(?:customers? |consumer )?(?:satisfaction )?rat(?:ed|ings?)"
_PRICED = r"(?:priced?|prices|pricing|price[- ]range|cost)"
_FRIENDLY = r"(?:famil(?:y|ies)|kids?|child(?:ren)?|children'?s)"


def _level(word: str, after: str) -> str:
    """`high rated`, `a high customer rating`, `rating is high`, `rated high`, and so on."""
    verb = r"(?: (?:is|are|of|as|from|range|that is|which is|its|quite|very|fairly|a|an|in the))*"
    return rf"\b{word}(?:ly)?[- ](?:quality )?{after}\b|\b{after}{verb} {word}(?:ly)?\b"


# fmt: off
STATED: dict[str, dict[str, str]] = {  # slot, value: pattern in text of lower case, without names of places
    "eatType": {
        "coffee shop": r"\bcoffee[- ]?shops?\b", "pub": r"\bpubs?\b", "restaurant": r"\brestaurants?\b",
    },
    "food": {
        "Chinese": r"\bchinese\b", "English": r"\b(?:english|british)\b", "Fast food": r"\bfast[- ]food",
        "French": r"\bfrench\b", "Indian": r"\bindian\b", "Italian": r"\bitalian\b", "Japanese": r"\bjapanese\b",
    },
    "priceRange": {
        "cheap": r"\bcheap(?:ly)?\b|\binexpensive\b|\b(?:" + _level("low", _PRICED) + ")",
        "high": r"\bexpensive\b|" + _level("high", _PRICED) + r"|\bhigh end\b",
        "moderate": r"\bmoderate(?:ly)?\b",
        "less than £20": r"(?:less th[ae]n|under|below|lower than|cheaper than) £? ?20\b",
        "more than £30": r"(?:more th[ae]n|over|above|higher than) £? ?30\b",
        "£20-25": r"£? ?20 ?(?:-|to|and|through) ?£? ?25\b",
    },
    "customer rating": {
        "1 out of 5": r"\b(?:1|one)(?: stars?)? (?:out )?of (?:5|five)\b|\b1/5|\b(?:1|one)[- ]star",
        "3 out of 5": r"\b(?:3|three)(?: stars?)? (?:out )?of (?:5|five)\b|\b3/5|\b(?:3|three)[- ]star",
        "5 out of 5": r"\b(?:5|five)(?: stars?)? (?:out )?of (?:5|five)\b|\b5/5|\b(?:5|five)[- ]star",
        "average": _level("average", _RATED), "high": _level("high", _RATED), "low": _level("low", _RATED),
    },
    "area": {
        "city centre": r"\bcity[- ]cent(?:re|er)\b|\bcent(?:re|er) of the city\b", "riverside": r"\briver(?:side)?\b",
    },
}
# fmt: on
_PATTERNS = {slot: {value: re.compile(form) for value, form in forms.items()} for slot, forms in STATED.items()}
_FAMILIES = re.compile(
    rf"\b{_FRIENDLY}[- ]?(?:friendly|oriented|welcoming)|\b(?:welcomes?|allows?|for|accepts?) {_FRIENDLY}\b"
)
_NO = re.compile(r"\b(?:not?|non|isn't|aren't|doesn't|unsuitable|never)\b|\badults?\b")


@dataclass(frozen=True)
class Errors:
    """Counts over one or more descriptions."""

    values: int = 0
    missing: int = 0
    wrong: int = 0
    added: int = 0

    def __add__(self, other: Errors) -> Errors:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Errors(*(one + two for one, two in pairs))

    @property
    def errors(self) -> int:
        return self.missing + self.wrong + self.added


def slots_of(prompt: str) -> dict[str, str]:
    """{slot: value} of `name[The Mill], food[French]`."""
    return dict(re.findall(r"([A-Za-z][A-Za-z ]*)\[([^\]]*)\]", prompt))


def stated(text: str, places: list[str]) -> dict[str, set[str]]:
    """The values that a description states, of each slot; `place` for names and neighbours, of those in `places`."""
    found: dict[str, set[str]] = {slot: set() for slot in ("place", "familyFriendly", *_PATTERNS)}
    for place in places:
        form = re.compile(rf"(?<!\w){re.escape(place)}(?!\w)", re.IGNORECASE)
        text, times = form.subn("_", text)
        if times:
            found["place"].add(place)
    text = " ".join(text.casefold().split())
    for slot, patterns in _PATTERNS.items():
        found[slot] = {value for value, form in patterns.items() if form.search(text)}
    for sentence in re.split(r"(?<=[.!?;])\s|, but |\band\b(?= (?:it )?is)", text):
        if _FAMILIES.search(sentence) or re.search(r"\badults?\b", sentence):
            found["familyFriendly"].add("no" if _NO.search(sentence) else "yes")
    return found


def errors_of(prompt: str, text: str) -> Errors:
    """Of one description."""
    slots = slots_of(prompt)
    own = [slots[slot] for slot in ("name", "near") if slot in slots]
    found = stated(text, sorted({*PLACES, *own}, key=len, reverse=True))
    missing = sum(place not in found["place"] for place in own)
    other = len(found.pop("place") - set(own))
    wrong = min(missing, other)
    total = Errors(len(own), missing - wrong, wrong, other - wrong)
    for slot, values in found.items():
        right = slots.get(slot)
        absent, others = right is not None and right not in values, len(values - {right})
        replaced = int(absent and others > 0)
        total += Errors(right is not None, absent - replaced, replaced, others - replaced)
    return total


def main(folders: list[str]) -> None:
    for folder in folders:
        files = [Path(folder)] if Path(folder).is_file() else sorted(Path(folder).glob("part-*.parquet"))
        if not files:
            raise SystemExit(f"{folder}: no part-*.parquet")
        rows: list[tuple[str, str | None]] = []
        for file in files:
            table = pq.read_table(file)
            text = "answer" if "answer" in table.schema.names else "generated_text"
            rows += zip(table["prompt"].to_pylist(), table[text].to_pylist(), strict=True)
        each = [errors_of(prompt, text or "") for prompt, text in rows]
        total = sum(each, Errors())
        right = sum(one.errors == 0 for one in each)
        share = 100 * total.errors / total.values
        print(
            f"{folder}: slot error rate {share:.2f}% of {total.values:,} values: {total.missing} missing, "
            f"{total.wrong} wrong, {total.added} added; {100 * right / len(rows):.1f}% of {len(rows):,} answers right"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
