"""The text of an answer while its tokens come, its thinking and its calls apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.engine.constraints.reasoning import Reasoning
from actors.openai_answers import REPLACEMENT
from actors.tool_calls import BEGIN, PYTHON_TAG, ToolFormat


class TextStream:
    """Parts of a text that, joined, are the text of all tokens up to its first stop string.

    A part is held back while it may change: bytes of a character that is not complete, and text that may become a stop
    string.

    Args:
        decode: Token ids -> text.
        stop: Stop strings.
        stop_ids: Tokens that end the answer and have no text.
        answer_start: See `StopStrings`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        answer_start: Callable[[str], int | None] = lambda text: 0,
    ) -> None:
        self._decode, self._stop, self._stop_ids, self._answer_start = decode, tuple(stop), stop_ids, answer_start
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
        answer = self._answer_start(self._text)
        found = [] if answer is None else [self._text.find(string, answer) for string in self._stop]
        found = [place for place in found if place >= 0]
        if found:
            return min(found)
        return len(self._text) - max((_overlap(self._text, string) for string in self._stop), default=0)


@dataclass(frozen=True)
class Part:
    """Further text of an answer, and further thinking before it."""

    text: str = ""
    thinking: str = ""

    def __add__(self, other: Part) -> Part:
        return Part(self.text + other.text, self.thinking + other.thinking)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking)


class AnswerStream:
    """Parts of an answer that, joined, are its text and its thinking.

    What may be a call of a tool is held back until the answer has ended; the white space around calls may have been
    sent. Thinking that only its end reveals has been sent as text. The text after thinking comes whole if it has a
    form, which may begin within a token.

    Args:
        text: Gives the parts of the raw text.
        marks: Those of thinking; None: nothing is split.
        begun: Whether the prompt ends inside thinking.
        has_form: Whether choices or a form hold for the text after thinking.
        calls: The form of calls; None: no tools are offered.
    """

    def __init__(
        self,
        text: TextStream,
        marks: Reasoning | None = None,
        *,
        begun: bool = False,
        has_form: bool = False,
        calls: ToolFormat | None = None,
    ) -> None:
        self._stream, self._marks, self._begun, self._has_form, self._calls = text, marks, begun, has_form, calls
        self._raw = self._text = self._thinking = ""
        self._is_plain = False  # the text so far does not begin with thinking

    def push(self, tokens: Sequence[int]) -> Part:
        """The part that these tokens make certain, perhaps empty."""
        self._raw += self._stream.push(tokens)
        text, thinking = (self._raw, "") if self._marks is None else self._split(self._marks)
        if self._has_form:
            text = ""
        elif self._calls is not None:
            text = text[: _before_calls(text, self._calls)]
        part = Part(text[len(self._text) :], thinking[len(self._thinking) :])
        self._text, self._thinking = text, thinking
        return part

    def finish(self, text: str, thinking: str | None = None, *, has_calls: bool = False) -> Part:
        """The last part. text, thinking: of the whole answer; has_calls: the text is what its calls have left."""
        thinking = thinking or ""
        if self._is_plain:
            text, thinking = thinking + text, ""
        known = self._text.strip() if has_calls else self._text
        return Part(text[len(known) :], thinking[len(self._thinking) :])

    def _split(self, marks: Reasoning) -> tuple[str, str]:
        """Text and thinking of the raw text, without what may still become a mark."""
        head = self._raw.lstrip()
        begins = head.startswith(marks.start)
        if not begins and marks.start.startswith(head):
            return "", ""
        self._is_plain = not begins and not self._begun
        before, end, after = (head.removeprefix(marks.start) if begins else self._raw).partition(marks.end)
        if not end:
            before = before[: len(before) - _overlap(before, marks.end)]
        return (before + after, "") if self._is_plain else (after, before)


def _before_calls(text: str, form: ToolFormat) -> int:
    """Characters of a text that are no part of a call, nor may become one."""
    if form == "hermes":
        found = text.find(BEGIN)
        return len(text) - _overlap(text, BEGIN) if found < 0 else found
    head = text.lstrip()
    return 0 if head[:1] in ("", "{") or PYTHON_TAG.startswith(head[: len(PYTHON_TAG)]) else len(text)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)
