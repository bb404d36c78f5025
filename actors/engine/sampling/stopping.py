"""Stop strings, which end an answer. A stop string may span several tokens, or end inside a token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

SLACK_TOKENS = 4  # extra tokens of the searched window, which may begin inside a character of up to four tokens


@dataclass(eq=False)
class StopStrings:
    """Finds the token that completes one of `strings` and so ends the answer. The text is cut before that string."""

    strings: Sequence[str]
    decode: Callable[[list[int]], str]  # token ids -> text
    special_ids: Collection[int] = ()  # tokens that decode to an empty text
    min_new_tokens: int = 0  # a stop string that is complete after this many tokens or fewer is ignored
    # text -> index at which the answer begins; None: not begun. Stop strings in the thinking before it are ignored
    answer_start: Callable[[str], int | None] = lambda text: 0
    _may_end: dict[int, bool] = field(default_factory=dict, init=False)  # token -> result of `_may_end_in`

    def __post_init__(self) -> None:
        self.special_ids = frozenset(self.special_ids)
        # each token outside `special_ids` decodes to at least one byte, so a string has at most one token per byte
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
        # check the whole text too, because a window that begins inside a character may decode to other text
        return self.first(tokens, self.decode(list(tokens))) is not None

    def _may_end_in(self, token: int) -> bool:
        """Return whether the text of `token` contains the last character of a stop string, or a part of a character."""
        found = self._may_end.get(token)
        if found is None:
            text = self.decode([token, token])  # decode it twice, because decoding may drop a space at the beginning
            partial = not text or "\ufffd" in text
            found = token not in self.special_ids and (partial or any(end in text for end in self._ends))
            self._may_end[token] = found
        return found

    def cut(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` before the first stop string."""
        text = self.decode(list(tokens))
        return text[: self.first(tokens, text)]

    def first(self, tokens: Sequence[int], text: str) -> int | None:
        """Return the index of the answer's first stop string that ends after `min_new_tokens` tokens, or None."""
        answer = self.answer_start(text)
        if answer is None:
            return None
        free = len(self.decode(list(tokens[: self.min_new_tokens])).rstrip("\ufffd"))  # without a part of a character
        starts = [text.find(string, max(answer, free - len(string) + 1)) for string in self.strings]
        return min((start for start in starts if start >= 0), default=None)
