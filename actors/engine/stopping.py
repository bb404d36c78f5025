"""Strings that end an answer. Tokens cut text where they like: a stop string may span some, or end inside one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

SLACK_TOKENS = 4  # a character of four bytes may be as many tokens


class StopStrings:
    """An answer ends with the token that completes one of `strings`, its text before the first of them.

    decode: token ids -> text. special_ids: tokens that decode to nothing. min_new_tokens: a string that these
    first tokens complete does not count.
    """

    def __init__(
        self,
        strings: Sequence[str],
        decode: Callable[[list[int]], str],
        special_ids: Collection[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self.strings = tuple(strings)
        self.decode = decode
        self.special_ids = frozenset(special_ids)
        self.free_tokens = min_new_tokens
        # any other token is at least one byte of text
        self.window = max(len(one.encode()) for one in strings) + SLACK_TOKENS

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the last of `tokens` completes a stop string."""
        if len(tokens) <= self.free_tokens:
            return False
        tail: list[int] = []
        for token in reversed(tokens):
            if token not in self.special_ids:
                tail.append(token)
            if len(tail) == self.window:
                break
        text = self.decode(tail[::-1])
        # a window that begins inside a character may read otherwise than the whole does
        return any(one in text for one in self.strings) and self._first(tokens, self.decode(list(tokens))) is not None

    def cut(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` before the first stop string."""
        text = self.decode(list(tokens))
        return text[: self._first(tokens, text)]

    def _first(self, tokens: Sequence[int], text: str) -> int | None:
        """Where the first stop string begins that ends behind the free tokens."""
        free = len(self.decode(list(tokens[: self.free_tokens])))
        places = [text.find(one, max(0, free - len(one) + 1)) for one in self.strings]
        return min((place for place in places if place >= 0), default=None)
