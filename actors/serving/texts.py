"""Streams an answer's text while its tokens are generated. Separates thinking from the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from actors.engine.constraints.reasoning import Reasoning
from actors.engine.sampling.stopping import StopStrings
from actors.openai_answers import REPLACEMENT


@dataclass(eq=False)
class AnswerStream:
    """Cuts a growing answer into parts (text, thinking). The parts add up to the whole text and the whole thinking.

    Output that may still change is held back: bytes of an incomplete character, and text that may become a stop string
    or a delimiter.
    Thinking without a start delimiter is sent as text, because only the later end delimiter shows that it is thinking.
    """

    decode: Callable[[list[int]], str]  # token ids -> text
    ending: StopStrings | None = None  # the answer's stop strings
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer and have no text
    _: KW_ONLY
    marks: Reasoning | None = None  # delimiters of thinking; None: thinking is not separated from the text
    begun: bool = False  # whether the prompt ends inside thinking
    # whether to send the text only when the answer has ended. Needed for labels, and if one token may hold both the end
    # of the thinking and the beginning of the answer
    text_at_end: bool = False
    _ids: list[int] = field(default_factory=list, init=False)
    # `_decoded` is the text of the tokens before index `_read`; the next decoding begins at index `_first`
    _first: int = field(default=0, init=False)
    _read: int = field(default=0, init=False)
    _decoded: str = field(default="", init=False)
    _sent_text: str = field(default="", init=False)
    _sent_thinking: str = field(default="", init=False)
    _is_plain: bool = field(default=False, init=False)  # whether the output so far does not begin with thinking

    def push(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Add tokens. Return the new text and the new thinking, without any part that may still change."""
        self._ids += [token for token in tokens if token not in self.stop_ids]
        known, text = self.decode(self._ids[self._first : self._read]), self.decode(self._ids[self._first :])
        if len(text) > len(known) and not text.endswith(REPLACEMENT):
            self._decoded += text[len(known) :]
            self._first, self._read = self._read, len(self._ids)
        raw = self._decoded[: self._certain()]
        text, thinking = (raw, "") if self.marks is None else self._split(raw, self.marks)
        if self.text_at_end:
            text = ""
        return self._part(text, thinking)

    def finish(self, text: str, thinking: str | None = None) -> tuple[str, str]:
        """Return the last part of text and thinking. text, thinking: those of the whole answer."""
        thinking = thinking or ""
        head, thinking = (thinking, "") if self._is_plain else ("", thinking)  # head: thinking that was sent as text
        return self._part(head + text, thinking)

    def _part(self, text: str, thinking: str) -> tuple[str, str]:
        part = text[len(self._sent_text) :], thinking[len(self._sent_thinking) :]
        self._sent_text, self._sent_thinking = text, thinking
        return part

    def _certain(self) -> int:
        """Return how many characters can be sent: those before a stop string, or a suffix that may become one."""
        if self.ending is None:
            return len(self._decoded)
        found = self.ending.first(self._ids, self._decoded)
        held = max(_overlap(self._decoded, string) for string in self.ending.strings)
        return len(self._decoded) - held if found is None else found

    def _split(self, raw: str, marks: Reasoning) -> tuple[str, str]:
        """Split raw text into (text, thinking). Leave out a suffix that may become a delimiter."""
        head = raw.lstrip()
        begins = head.startswith(marks.start)
        if not begins and marks.start.startswith(head):
            return "", ""
        self._is_plain = not begins and not self.begun
        before, end, after = (head.removeprefix(marks.start) if begins else raw).partition(marks.end)
        if not end:
            before = before[: len(before) - _overlap(before, marks.end)]
        return (before + after, "") if self._is_plain else (after, before)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, but not all of `mark`."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)
