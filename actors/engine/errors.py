"""The error for mistakes that a user can correct, and parts of its messages. Any other exception is a failure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong configuration or input. Its message is one line that names the key, file or row and the remedy."""


def flat(value: object) -> str:
    """The text of an error or another value without line breaks."""
    return " ".join(str(value).split())


def nearest(name: object, known: Iterable[str]) -> str:
    """The question "did you mean …?" for a mistyped name; empty if no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def suggestion(name: object, known: Iterable[str]) -> str:
    """`nearest`, or the list of known names."""
    known = list(known)
    return nearest(name, known) or f"known: {', '.join(known)}"
