"""Signs of bad answers, and the share of them above which `try`, `plan`, `adapt`, `run` and the report warn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.answers import Answer

CHECKS = (  # field of `ShardStats`, share of the answers above which it is a warning, the warning
    ("same_answers", 0.6, "are the same"),
    ("empty_answers", 0.2, "are empty"),
    ("repeating_answers", 0.2, "repeat the same words again and again"),
    ("cut_off", 0.99, "reach the length limit: raise sampling.max_new_tokens, or see at which tokens answers end"),
)
LEAST_ANSWERS = 5  # a share of fewer answers of a job says nothing
LEAST_TRIED = 20  # fewest answers that `try` checks
ORDER = 4  # words of the n-grams whose repeats are counted
LEAST_REPEATS, REPEATED_SHARE = 4, 0.5  # repeated n-grams of an answer that repeats itself, and their share
MOST_COMMON = 3  # texts that a shard counts
TEXT_CHARS = 100  # maximum characters shown of a common text


def repeated_ngrams(units: Sequence[Any]) -> tuple[int, int]:
    """Return how many of a sequence's 4-grams occur earlier in it, and how many it has.

    The first number divided by the second is seq-rep-4 of Welleck et al., "Neural Text Generation with Unlikelihood
    Training", ICLR 2020.
    """
    grams = [tuple(units[start : start + ORDER]) for start in range(len(units) - ORDER + 1)]
    return len(grams) - len(set(grams)), len(grams)


def repeats_itself(text: str) -> bool:
    """Tell whether at least half of a text's 4-grams are repeats: of words, or of characters where words are rare."""
    words = text.split()
    repeats, grams = repeated_ngrams(words if 10 * len(words) > len(text) else text)
    return repeats >= LEAST_REPEATS and repeats >= REPEATED_SHARE * grams


def texts_of(answers: Iterable[Answer]) -> list[str]:
    """Return the texts of answers; a tool call is its text form. Rows without an answer are left out."""
    answered = [answer for answer in answers if answer.finish_reason != "error"]
    return [answer.generated_text or str(answer.tool_calls or "") for answer in answered]


def count_answers(texts: Sequence[str]) -> dict[str, Any]:
    """Count the answers that show a sign, for `ShardStats`. common_answers: JSON of {text: answers}."""
    common = [(text[:TEXT_CHARS], count) for text, count in Counter(texts).most_common(MOST_COMMON) if count > 1]
    return {
        "empty_answers": sum(not text.strip() for text in texts),
        "repeating_answers": sum(map(repeats_itself, texts)),
        "common_answers": json.dumps(dict(common)) if common else "",
    }


def warnings(
    counts: Mapping[str, int], common: Mapping[str, int], answers: int, least: int = LEAST_ANSWERS
) -> list[str]:
    """Return one line for each sign that more answers show than `CHECKS` allows; none for fewer than `least` answers.

    counts: answers that show a sign. common: number of answers by text. answers: their number, errors left out.
    """
    if answers < least:
        return []
    text, same = max(common.items(), key=lambda pair: pair[1], default=("", 0))
    found = {"cut_off": 0, **counts, "same_answers": same}
    return [
        f"{found[name]:,} of {answers:,} answers ({found[name] / answers:.1%}) {sign}"
        f"{f': {text!r}' if name == 'same_answers' else ''}; `skipdecode try` shows prompts and answers"
        for name, share, sign in CHECKS
        if found[name] > share * answers
    ]


def warnings_of(texts: Sequence[str], least: int = LEAST_ANSWERS, cut_off: int = 0) -> list[str]:
    """Return `warnings` for these answers. cut_off: number of answers that end at a length limit."""
    counts = {**count_answers(texts), "cut_off": cut_off}
    return warnings(counts, json.loads(counts["common_answers"] or "{}"), len(texts), least)
