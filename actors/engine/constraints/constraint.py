"""The interface between an answer format (a list of labels, or a grammar) and the sampling of tokens.

A constraint is compiled once and shared by rows. Each row has its own `AllowedTokens`, which tracks the row's progress.
Sampling excludes all tokens that the `AllowedTokens` does not allow as the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # not imported at run time, because a job's configuration is read without numpy
    import numpy as np
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.int32]"  # [words_of(V)]; token t is allowed if bit t % 32 of word t // 32 is set


def words_of(vocabulary: int) -> int:
    """Return the number of 32-bit words of a mask with one bit per token."""
    return (vocabulary + 31) // 32


class AllowedTokens(Protocol):
    """The progress of one row's answer through its constraint (answer format).

    scored: whether log-probabilities among the allowed tokens are needed. label: index of the label that the row has
    chosen; None for a grammar, or before the choice is final. error: why the row cannot continue; None if it can.
    ends: next tokens that mean the same, so that sampling adds their probabilities.
    """

    @property
    def scored(self) -> bool: ...

    @property
    def label(self) -> int | None: ...

    @property
    def error(self) -> str | None: ...

    @property
    def ends(self) -> Sequence[int]: ...

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next. For one token, this is usually faster than `write`."""

    def write(self, bits: Bits) -> None:
        """Set the bits of all tokens that may come next, and clear all other bits."""

    def advance(self, token: int) -> bool:
        """Record an allowed token. Return whether it ends the row, because no token can follow."""

    def is_complete(self) -> bool:
        """Return whether the tokens so far are a complete answer."""


class Constraint(Protocol):
    """A compiled answer format, shared by all rows that must follow it.

    name: key of the job file that sets the format. most_tokens: maximum number of tokens in an answer; None: no limit.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_tokens(self) -> int | None: ...

    def begin(self) -> AllowedTokens:
        """Return the state of a row before its first token."""

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        """Return the text of an answer, given its tokens without the end token. label: see `AllowedTokens`."""
