"""Separates a model's thinking from the answer that follows it. Only the answer must have the requested format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from actors.engine.constraints.constraint import AllowedTokens, Bits, Constraint
from actors.engine.errors import UserError
from actors.engine.sampling.stopping import StopStrings

# start and end delimiters of thinking in the chat templates of known models
_KNOWN = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True)
class Reasoning:
    """The delimiters around a model's thinking."""

    start: str = "<think>"  # delimiter before the thinking; some chat templates end the prompt with it
    end: str = "</think>"  # delimiter after the thinking

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not getattr(self, name).strip():
                raise UserError(f"reasoning.{name} is empty")

    @classmethod
    def of_template(cls, template: str) -> Reasoning | None:
        """Return the known delimiters that occur in a chat template; None if none occur."""
        return next((cls(start, end) for start, end in _KNOWN if end in template), None)

    def check(self, special_tokens: Collection[str]) -> None:
        """Raise UserError if a delimiter is a special token, because a decoded text contains no special tokens."""
        for mark in (self.start, self.end):
            if mark in special_tokens:
                raise UserError(f"reasoning: {mark!r} is a special token, which has no text: leave reasoning out")

    def split(self, text: str, *, begun: bool) -> tuple[str | None, str]:
        """Split a text into the thinking without delimiters (None if there is none) and the answer.

        The answer is empty if the thinking does not end. begun: whether the prompt ends inside thinking.
        """
        begins = text.lstrip().startswith(self.start)
        thinking, end, answer = text.partition(self.end)
        if not end and not begins and not begun:
            return None, text
        if begins:
            thinking = thinking.lstrip().removeprefix(self.start)
        return thinking, answer

    def answer_start(self, text: str, *, begun: bool) -> int | None:
        """Return the index at which the answer begins in an unfinished text; None if the text may still be thinking.

        begun: whether the prompt ends inside thinking.
        """
        head = text.lstrip()
        if head and self.start.startswith(head):
            return None
        if not begun and not head.startswith(self.start):
            return 0
        end = text.find(self.end)
        return None if end < 0 else end + len(self.end)

    def begun_by(self, prompt: str) -> bool:
        """Return whether a prompt ends inside thinking."""
        return prompt.rfind(self.start) > prompt.rfind(self.end)

    def is_over(self, prompt: str) -> bool:
        """Return whether a prompt ends with the end delimiter. Chat templates write it there to turn thinking off."""
        return prompt.rstrip().endswith(self.end)


@dataclass(eq=False)
class AfterReasoning:
    """Constrains the answer after the thinking; see `Constraint`. In the thinking, only stop tokens are forbidden."""

    inner: Constraint  # constraint on the answer
    reasoning: Reasoning
    decode: Callable[[list[int]], str]  # token ids -> text
    stop_ids: Collection[int]  # tokens that end an answer
    special_ids: Collection[int] = ()  # tokens that decode to an empty text
    most_tokens: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.end = StopStrings((self.reasoning.end,), self.decode, self.special_ids)

    @property
    def name(self) -> str:
        return self.inner.name

    def begin(self) -> ReasoningProgress:
        return ReasoningProgress(self)

    def split(self, tokens: Sequence[int], label: int | None) -> tuple[str, str]:
        """Return the text of the thinking without delimiters, and the text of the answer, which may be empty."""
        length = next((count for count in range(1, len(tokens) + 1) if self.end.ended(tokens[:count])), len(tokens))
        thinking, _ = self.reasoning.split(self.decode(list(tokens[:length])), begun=True)
        answer = tokens[length:]
        return thinking or "", self.inner.text(answer, label) if answer or label is not None else ""

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        return self.split(tokens, label)[1]


class ReasoningProgress:
    """The progress of one row through its thinking and its answer; see `AllowedTokens` for the methods."""

    def __init__(self, constraint: AfterReasoning) -> None:
        self._constraint = constraint
        self._inner: AllowedTokens = constraint.inner.begin()
        self._thinking: list[int] | None = []

    @property
    def scored(self) -> bool:
        return self._thinking is None and self._inner.scored

    @property
    def ends(self) -> Sequence[int]:
        return self._inner.ends if self._thinking is None else ()

    @property
    def label(self) -> int | None:
        return self._inner.label

    @property
    def error(self) -> str | None:
        return self._inner.error

    def allows(self, token: int) -> bool:
        if self._thinking is not None:
            return token not in self._constraint.stop_ids
        return self._inner.allows(token)

    def write(self, bits: Bits) -> None:
        if self._thinking is None:
            self._inner.write(bits)
            return
        bits[:] = -1
        masks = bits.view("uint32")
        for token in self._constraint.stop_ids:
            masks[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF

    def advance(self, token: int) -> bool:
        if self._thinking is None:
            return self._inner.advance(token)
        self._thinking.append(token)
        if self._constraint.end.ended(self._thinking):
            self._thinking = None
        return False

    def is_complete(self) -> bool:
        return self._thinking is None and self._inner.is_complete()
