"""Finds signs of bad answers. `try`, `plan`, `adapt`, `run` and the report warn if too many answers show a sign.

`run` warns when it has committed its first shard, so that it can be stopped, and again at its end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.answers import Answer

CHECKS = (  # sign; share of answers above which to warn; last words of the warning
    ("same_answers", 0.6, "are the same"),
    ("empty_answers", 0.2, "are empty"),
    ("repeating_answers", 0.2, "repeat the same words again and again"),
    ("cut_off", 0.5, "reach the length limit: raise sampling.max_new_tokens, or check the tokens that end answers"),
)
LEAST_ANSWERS = 5  # minimum number of answers for a warning; a share of fewer answers means little
LEAST_TRIED = 20  # minimum number of answers for a warning by `try`
ORDER = 4  # length n of the n-grams whose repeats are counted
LEAST_REPEATS, REPEATED_SHARE = 4, 0.5  # minimum number and share of repeats in an answer that repeats itself
MOST_COMMON = 3  # maximum number of frequent texts in a shard's record
TEXT_CHARS = 100  # maximum number of characters to show of a common text


def repeated_ngrams(units: Sequence[Any]) -> tuple[int, int]:
    """Return how many 4-grams of a sequence repeat an earlier 4-gram, and how many 4-grams the sequence has.

    The first number divided by the second is seq-rep-4 of Welleck et al., "Neural Text Generation with Unlikelihood
    Training", ICLR 2020.
    """
    grams = [tuple(units[start : start + ORDER]) for start in range(len(units) - ORDER + 1)]
    return len(grams) - len(set(grams)), len(grams)


def repeats_itself(text: str) -> bool:
    """Return whether at least half of a text's 4-grams repeat: 4-grams of words, or of characters if words are rare."""
    words = text.split()
    repeats, grams = repeated_ngrams(words if 10 * len(words) > len(text) else text)
    return repeats >= LEAST_REPEATS and repeats >= REPEATED_SHARE * grams


def texts_of(answers: Iterable[Answer]) -> list[str]:
    """Return the texts of answers without an error."""
    return [answer.generated_text or "" for answer in answers if answer.finish_reason != "error"]


def count_answers(texts: Sequence[str]) -> dict[str, Any]:
    """Count the answers that show each sign. The keys of the returned dict are fields of `ShardStats`."""
    common = [(text[:TEXT_CHARS], count) for text, count in Counter(texts).most_common(MOST_COMMON) if count > 1]
    return {
        "empty_answers": sum(not text.strip() for text in texts),
        "repeating_answers": sum(map(repeats_itself, texts)),
        # if cutting made texts equal, `reversed` keeps the count of the most frequent one
        "common_answers": json.dumps(dict(reversed(common))) if common else "",
    }


def warnings(
    counts: Mapping[str, int], common: Mapping[str, int], answers: int, least: int = LEAST_ANSWERS
) -> list[str]:
    """Return a warning for each sign in `CHECKS` that occurs in too many answers; [] for fewer than `least` answers.

    counts: sign -> its number of answers. common: text -> number of answers with this text. answers: number of
    answers without an error.
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
    """Return `warnings` for answers with these texts. cut_off: how many of the answers ended at a length limit."""
    counts = {**count_answers(texts), "cut_off": cut_off}
    return warnings(counts, json.loads(counts["common_answers"] or "{}"), len(texts), least)
