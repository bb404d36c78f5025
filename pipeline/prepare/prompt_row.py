"""A row on its way to a prompt: its texts become tokens, which must fit the context."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    error: str | None = None

    def encode_marked(self, spec: PromptSpec) -> None:
        """Make token ids of a prompt with marked control tokens, or set the row's error."""
        assert isinstance(self.prompt, str)
        control = control_tokens(tokenizer_of(spec.checkpoint))
        try:
            self.prompt = control.encode(self.prompt, special_tokens=not self.is_chat)
        except UserError as error:
            self.error = str(error)

    def fit(self, spec: PromptSpec) -> None:
        """Refuse or truncate a prompt of token ids that leaves no room for a whole label, or one token of free text.

        Raises UserError with the row's error.
        """
        tokens, context = self.prompt, spec.context_length
        assert isinstance(tokens, list)
        if not tokens:
            raise UserError("prompt has no tokens")
        if len(tokens) + (self.label or 1) <= context:
            return
        if spec.too_long == "error":
            raise UserError(_no_room(str(len(tokens)), self, spec))
        answer = self.label or self.params.max_new_tokens
        if answer >= context:
            raise UserError(
                f"prompt of {len(tokens)} tokens: {answer} new ones leave it no room in a context of {context}"
            )
        self.prompt = tokens[answer - context :]


def bound_length(row: Row, spec: PromptSpec) -> None:
    """Refuse a text that cannot fit the context before it is tokenized, or cut it to the part that truncation reads."""
    if not isinstance(row.prompt, str):
        return
    if spec.too_long == "truncate_left":
        row.prompt = row.prompt[-TRUNCATED_CHARACTERS:]
        return
    least = fewest_tokens(spec.checkpoint, row.prompt)
    if least > spec.context_length - (row.label or 1):
        row.error = _no_room(f"at least {least}", row, spec)


def _no_room(tokens: str, row: Row, spec: PromptSpec) -> str:
    answer = f" for a label of {row.label - 1}" if row.label else ""
    return f"prompt of {tokens} tokens leaves no room{answer} in a context of {spec.context_length}"
