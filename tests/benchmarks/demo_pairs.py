"""Pairs that teach the demo model to copy: E2E's training pairs with other values, in prompt and reference alike.

    .venv/bin/python tests/benchmarks/demo_pairs.py --pairs 40000 --replaced 0.8 --seed 4

Only references that state every value of their prompt and no other are taken (restaurant_slots.py). In a share of the
pairs the names of the restaurant and of its neighbour are replaced at random, and other values that the reference has
literally: half of the names are those of the demo, half are made up. The same reference comes more than once, each
time with other values.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from restaurant_slots import PLACES, errors_of, slots_of

from pipeline.advise.demo_data import OPTIONAL_SLOTS

# fmt: off
FIRST = [
    "Amber", "Bell", "Black", "Blue", "Bright", "Broken", "Copper", "Crimson", "Crooked", "Crystal", "Dancing",
    "Emerald", "Flying", "Garden", "Golden", "Grand", "Green", "Happy", "Harbour", "Hidden", "Hungry", "Iron",
    "Ivory", "Jolly", "King's", "Lazy", "Little", "Lucky", "Maple", "Merry", "Midnight", "Noble", "Old",
    "Orange", "Painted", "Quiet", "Queen's", "Red", "River", "Royal", "Rustic", "Silver", "Singing", "Sleepy",
    "Spice", "Stone", "Summer", "Twisted", "Velvet", "White", "Winter", "Yellow",
]
SECOND = [
    "Anchor", "Apple", "Arms", "Barn", "Bay", "Bear", "Bistro", "Boat", "Bowl", "Bridge", "Café", "Castle",
    "Cat", "Cellar", "Corner", "Cottage", "Court", "Crown", "Curry", "Diner", "Dragon", "Eagle", "Elephant",
    "Falcon", "Fig", "Fork", "Fox", "Garden", "Grill", "Hall", "Hare", "Hotel", "House", "Inn", "Kitchen",
    "Lamb", "Lantern", "Lion", "Lodge", "Market", "Noodle Bar", "Oak", "Oven", "Palace", "Pantry", "Pearl",
    "Pepper", "Plate", "Ploughman", "Rose", "Ship", "Spoon", "Star", "Stove", "Swan", "Table", "Tavern",
    "Tower", "Tree", "Vine", "Well", "Wheel", "Willow", "Windmill",
]
ONSETS = [
    "", "b", "br", "c", "ch", "d", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "pr", "r", "s",
    "st", "t", "tr", "v", "w", "z",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo", "é"]
ENDS = ["", "n", "r", "l", "s", "m", "tt", "zz", "ck", "nd"]
LITERAL = {  # slot: values that replace each other, in which phrase
    "eatType": [(OPTIONAL_SLOTS["eatType"], "{}")],
    "food": [(OPTIONAL_SLOTS["food"], "{}")],
    "priceRange": [(["less than £20", "more than £30"], "{}"), (["cheap", "high", "moderate"], "{} price range")],
    "customer rating": [
        (["1 out of 5", "3 out of 5", "5 out of 5"], "{}"),
        (["average", "high", "low"], "{} customer rating"),
    ],
    "area": [(OPTIONAL_SLOTS["area"], "{} area")],
}
# fmt: on
_VALUES = "|".join(value for groups in LITERAL.values() for values, _ in groups for value in values)
_ARTICLE = re.compile(rf"\b([Aa])n? (?=({_VALUES})\b)")
_FAST_FOOD = re.compile(r"(?<!^)\b[Ff]ast food(?: food)?\b")


def made_up_place(rng: random.Random) -> str:
    """A name of one to three words."""
    word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice([1, 2, 2, 3]))) + rng.choice(ENDS)
    word = word.capitalize()
    first, second = rng.choice(FIRST), rng.choice(SECOND)
    return rng.choice(
        [word, word, f"Café {word}", f"{word} {second}", f"The {word}", f"The {second}", first, f"{first} {second}"]
        + [f"The {first} {second}"] * 3
    )


def changed(prompt: str, reference: str, rng: random.Random) -> tuple[str, str]:
    """The pair with other places and another food, where the reference has them literally."""
    slots = slots_of(prompt)
    new: dict[str, str] = {}
    for slot in ("name", "near"):
        if slot in slots:
            new[slots[slot]] = rng.choice(PLACES) if rng.random() < 0.5 else made_up_place(rng)
    for slot, groups in LITERAL.items():
        for values, phrase in groups:
            old = slots.get(slot)
            if old in values and phrase.format(old) in reference:
                value = rng.choice(values)
                reference = reference.replace(phrase.format(old), phrase.format(value))
                prompt = prompt.replace(f"{slot}[{old}]", f"{slot}[{value}]")
    form = re.compile("|".join(re.escape(old) for old in sorted(new, key=len, reverse=True)))
    prompt = form.sub(lambda match: new[match[0]], prompt)
    reference = form.sub(lambda match: new[match[0]], reference)
    reference = re.sub(r"\b[Tt]he The ", "The ", reference)
    reference = _FAST_FOOD.sub("fast food", reference)
    return prompt, _ARTICLE.sub(lambda match: match[1] + ("n " if match[2][0] in "EIa" else " "), reference)


def pairs(source: Path, count: int, replaced: float, seed: int) -> list[tuple[str, str]]:
    """`count` pairs, of which each reference is right. replaced: share of those with other values."""
    table = pq.read_table(source)
    given = [
        (prompt, " ".join(reference.split()))
        for prompt, reference in zip(table["prompt"].to_pylist(), table["reference"].to_pylist(), strict=True)
    ]
    given = [pair for pair in dict.fromkeys(given) if right(*pair)]
    print(f"{source}: {len(given):,} of {table.num_rows:,} references state all values and no other")
    rng = random.Random(seed)
    made: list[tuple[str, str]] = []
    while len(made) < count:
        rng.shuffle(given)
        for pair in given:
            prompt, reference = changed(*pair, rng) if rng.random() < replaced else pair
            if right(prompt, reference) and len(set(slots_of(prompt).values())) == len(slots_of(prompt)):
                made.append((prompt, reference))
    return made[:count]


def right(prompt: str, reference: str) -> bool:
    return errors_of(prompt, reference).errors == 0


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--source", type=Path, default=Path("../shared/data/e2e/train.parquet"), help="by fetch_data.py"
    )
    parser.add_argument("--out", type=Path, default=Path("work/demo-copy/pairs.parquet"))
    parser.add_argument("--pairs", type=int, default=40_000)
    parser.add_argument("--replaced", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=4)
    arguments = parser.parse_args()
    prompts, references = zip(
        *pairs(arguments.source, arguments.pairs, arguments.replaced, arguments.seed), strict=True
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": prompts, "reference": references}), arguments.out)
    print(f"{arguments.out}: {len(prompts):,} pairs")


if __name__ == "__main__":
    main()
