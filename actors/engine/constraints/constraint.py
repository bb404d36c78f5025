"""The interface between an answer format (labels, a grammar) and the sampling of tokens.

A constraint is compiled once and shared by rows; each row follows it with its own `AllowedTokens`. Sampling asks which
tokens may come next and excludes all others from the logits, no matter which layers computed the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # configuration is read without numpy
    import numpy as np
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.int32]"  # [words_of(V)], bit t % 32 of word t // 32 is set if token t is allowed


def words_of(vocabulary: int) -> int:
    """Return the number of 32-bit words of a mask with a bit for each token."""
    return (vocabulary + 31) // 32


class AllowedTokens(Protocol):
    """How far one row's tokens have got in its constraint.

    scored: whether log-probabilities among the allowed tokens are needed. label: index of the label that
    the answer is; None until it is decided, and for a grammar. error: why no further token is allowed, or None.
    """

    @property
    def scored(self) -> bool: ...

    @property
    def label(self) -> int | None: ...

    @property
    def error(self) -> str | None: ...

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next; usually faster than a mask."""

    def write(self, bits: Bits) -> None:
        """Set the mask's bits of the tokens that may come next, and clear all others."""

    def advance(self, token: int) -> bool:
        """Record an allowed token; return whether the answer ends with it, because everything after it is certain."""

    def is_complete(self) -> bool:
        """Return whether the tokens so far are a whole answer."""


class Constraint(Protocol):
    """A compiled answer format, shared by all rows that have it.

    name: the job file's key that sets the format. most_tokens: tokens of the longest answer; None if unlimited.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_tokens(self) -> int | None: ...

    def begin(self) -> AllowedTokens:
        """Return the state before the first token."""

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        """Return the text of an answer's tokens without the end token. label: see `AllowedTokens`."""
