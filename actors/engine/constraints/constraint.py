"""The interface between an answer format (labels, a grammar) and the sampling of tokens.

A constraint is compiled once and shared by rows; each row follows it by its own `AllowedTokens`. Sampling asks which
tokens may come next and excludes all others from the logits, whatever layers computed them.
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
    """The place that one row's tokens have reached in its constraint.

    scored: whether log-probabilities among the allowed tokens are needed. label: number of the label that the
    answer is, once it is decided; None for a grammar. error: why no token is allowed any more.
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
        """Follow an allowed token; return whether the answer ends with it, because all that follows is certain."""

    def is_complete(self) -> bool:
        """Return whether the tokens so far are a whole answer."""


class Constraint(Protocol):
    """A compiled answer format, shared by all rows that have it.

    name: key of a job file that sets it. most_tokens: tokens of the longest answer; None if there is no limit.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_tokens(self) -> int | None: ...

    def begin(self) -> AllowedTokens:
        """Return the state before the first token."""

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        """Return the text of an answer's tokens without the end token. label: see `AllowedTokens`."""
