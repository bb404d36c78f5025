"""Strings that end an answer. A stop string may span several tokens, or end inside one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

SLACK_TOKENS = 4  # a character of four bytes may be four tokens


@dataclass(eq=False)
class StopStrings:
    """Ends an answer at the token that completes one of `strings`. The text ends before the first stop string."""

    strings: Sequence[str]
    decode: Callable[[list[int]], str]  # token ids -> text
    special_ids: Collection[int] = ()  # tokens that decode to no text
    min_new_tokens: int = 0  # a stop string that ends within this many first tokens is ignored
    # text -> index where the answer begins; stop strings before it (in thinking) are ignored. None: not begun yet
    answer_start: Callable[[str], int | None] = lambda text: 0
    _may_end: dict[int, bool] = field(default_factory=dict, init=False)  # token -> whether a string may end inside it

    def __post_init__(self) -> None:
        self.special_ids = frozenset(self.special_ids)
        # tokens other than `special_ids` give at least one byte, so no string spans more tokens than it has bytes
        self.window = max(len(string.encode()) for string in self.strings) + SLACK_TOKENS
        self._ends = {string[-1] for string in self.strings}

    def ended(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens` completes a stop string."""
        if len(tokens) <= self.min_new_tokens or not self._may_end_in(tokens[-1]):
            return False
        window: list[int] = []
        for token in reversed(tokens):
            if token not in self.special_ids:
                window.append(token)
            if len(window) == self.window:
                break
        text = self.decode(window[::-1])
        if not any(string in text for string in self.strings):
            return False
        # check the whole text: a window that begins inside a character may decode to something else
        return self._first(tokens, self.decode(list(tokens))) is not None

    def _may_end_in(self, token: int) -> bool:
        """Return whether a token may hold the last character of a stop string, or a part of a character."""
        found = self._may_end.get(token)
        if found is None:
            text = self.decode([token, token])  # twice: the space with which a text begins may be dropped
            partial = not text or "\ufffd" in text
            found = token not in self.special_ids and (partial or any(end in text for end in self._ends))
            self._may_end[token] = found
        return found

    def cut(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` before the first stop string."""
        text = self.decode(list(tokens))
        return text[: self._first(tokens, text)]

    def _first(self, tokens: Sequence[int], text: str) -> int | None:
        """Return the index of the answer's first stop string that ends after the first `min_new_tokens` tokens."""
        answer = self.answer_start(text)
        if answer is None:
            return None
        free = len(self.decode(list(tokens[: self.min_new_tokens])))
        starts = [text.find(string, max(answer, free - len(string) + 1)) for string in self.strings]
        return min((start for start in starts if start >= 0), default=None)
