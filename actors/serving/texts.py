"""The text of an answer while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.openai_answers import REPLACEMENT


class TextStream:
    """Parts of a text that, joined, are the text of all tokens up to its first stop string.

    A part is held back while it may change: bytes of a character that is not complete, and text that may become a stop
    string.

    Args:
        decode: Token ids -> text.
        stop: Stop strings.
        stop_ids: Tokens that end the answer and have no text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), stop_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decode, self._stop, self._stop_ids = decode, tuple(stop), stop_ids
        self._ids: list[int] = []
        self._first = self._read = 0  # tokens decoded for their neighbours' sake, and tokens whose text is known
        self._text = ""
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The part that these tokens make certain, perhaps empty."""
        self._ids += [token for token in tokens if token not in self._stop_ids]
        known, text = self._decode(self._ids[self._first : self._read]), self._decode(self._ids[self._first :])
        if len(text) > len(known) and not text.endswith(REPLACEMENT):
            self._text += text[len(known) :]
            self._first, self._read = self._read, len(self._ids)
        return self._send(self._certain())

    def finish(self, text: str) -> str:
        """The last part. text: of the whole answer."""
        self._text = text
        return self._send(len(text))

    def _send(self, end: int) -> str:
        part = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return part

    def _certain(self) -> int:
        """Characters that are no part of a stop string, nor may become one."""
        found = [place for string in self._stop if (place := self._text.find(string)) >= 0]
        if found:
            return min(found)
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(string.startswith(tail) for string in self._stop):
                return len(self._text) - length
        return len(self._text)
