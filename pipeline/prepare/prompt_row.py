"""A row on its way to a prompt: its texts become tokens, which must fit the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.continuations import boundary_texts, checked_ids, split
from actors.control_tokens import control_tokens
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.engine.types import SamplingParams
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.tokenizer import fewest_tokens, tokenizer_of

TRUNCATED_CHARACTERS = 2**23  # `too_long: truncate_left` reads no more of a prompt, from its end


@dataclass
class Row:
    """A row on its way to a prompt; `error` ends it.

    Args:
        label: tokens of its longest label and the end, or 0.
        is_chat: the chat template has written its text, with special tokens.
        control_tokens: those that the row's values spell.
        is_marked: they are marked in the prompt, see `ControlTokens`.
        tools: whether the prompt offers tools.
        texts: its continuations; None for a row to answer.
        continuations: their token ids.
    """

    prompt: str | list[int] = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    sampling: str | None = None
    choices: list[str] | None = None
    form: OutputFormat | None = None
    label: int = 0
    is_chat: bool = False
    control_tokens: int = 0
    is_marked: bool = False
    tools: bool = False
    texts: list[str] | None = None
    continuations: list[list[int]] | None = None
    error: str | None = None

    def encode_marked(self, spec: PromptSpec) -> None:
        """Make token ids of a prompt with marked control tokens, or set the row's error."""
        assert isinstance(self.prompt, str)
        control = control_tokens(tokenizer_of(spec.checkpoint))
        try:
            self.prompt = control.encode(self.prompt, special_tokens=not self.is_chat)
        except UserError as error:
            self.error = str(error)

    def to_tokenize(self, spec: PromptSpec) -> list[tuple[str, bool]]:
        """The texts whose tokens `read_tokens` takes, each with whether the tokenizer adds special tokens."""
        if self.texts is None:
            return [(self.prompt, not self.is_chat)] if isinstance(self.prompt, str) else []
        if isinstance(self.prompt, str):
            return boundary_texts(tokenizer_of(spec.checkpoint), self.prompt, self.texts, is_chat=self.is_chat)
        return [(text, False) for text in self.texts]

    def read_tokens(self, encoded: Sequence[list[int]], spec: PromptSpec) -> None:
        """Set prompt and continuations from the tokens of `to_tokenize`. Raises UserError with the row's error."""
        if self.texts is None:
            tokens = self.prompt if isinstance(self.prompt, list) else encoded[0]
        elif isinstance(self.prompt, list):
            tokens, self.continuations = self.prompt, checked_ids(encoded)
        else:
            tokens, self.continuations = split(tokenizer_of(spec.checkpoint), encoded, is_chat=self.is_chat)
        self.prompt = _fit(tokens, self, spec)


def bound_length(row: Row, spec: PromptSpec) -> None:
    """Refuse a text that cannot fit the context before it is tokenized, or cut it to the part that truncation reads."""
    for number, text in enumerate(row.texts or (), 1):
        least = fewest_tokens(spec.checkpoint, text)
        if least > spec.context_length:
            row.error = f"continuation {number} of at least {least} tokens exceeds the context of {spec.context_length}"
            return
    if not isinstance(row.prompt, str):
        return
    if spec.too_long == "truncate_left":
        row.prompt = row.prompt[-TRUNCATED_CHARACTERS:]
        return
    room = spec.context_length - (row.label or 1 if row.texts is None else 0)
    least = fewest_tokens(spec.checkpoint, row.prompt)
    if least > room:
        row.error = _no_room(f"at least {least}", row, spec)


def _fit(tokens: list[int], row: Row, spec: PromptSpec) -> list[int]:
    """Tokens that leave room for the answer: for a whole label, or for one token of free text.

    Raises UserError with the row's error.
    """
    if not tokens:
        raise UserError("prompt has no tokens")
    context = spec.context_length
    if row.continuations is not None:
        return _fit_scored(tokens, max(map(len, row.continuations)), spec)
    if len(tokens) + (row.label or 1) <= context:
        return tokens
    if spec.too_long == "error":
        raise UserError(_no_room(str(len(tokens)), row, spec))
    answer = row.label or row.params.max_new_tokens
    if answer >= context:
        raise UserError(f"prompt of {len(tokens)} tokens: {answer} new ones leave it no room in a context of {context}")
    return tokens[answer - context :]


def _fit_scored(tokens: list[int], longest: int, spec: PromptSpec) -> list[int]:
    """The prompt of a row whose longest continuation has so many tokens, the last of which is never an input."""
    left = spec.context_length - (longest - 1)
    if len(tokens) <= left:
        return tokens
    both = f"prompt of {len(tokens)} tokens and continuation of {longest}"
    if spec.too_long == "error" or left < 1:
        raise UserError(f"{both} exceed the context of {spec.context_length}")
    return tokens[-left:]


def _no_room(tokens: str, row: Row, spec: PromptSpec) -> str:
    answer = f" for a label of {row.label - 1}" if row.label else ""
    return f"prompt of {tokens} tokens leaves no room{answer} in a context of {spec.context_length}"
