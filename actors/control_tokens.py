"""Encodes control tokens such as `<|im_end|>`: as tokens if the template wrote them, as plain text if a user did.

A template is rendered twice. The first rendering, without markers, is the prompt. The second one has markers around the
user's control tokens, which show who wrote each control token. It cannot be the prompt, because some templates write
other text if a value holds markers. Markers and the encoding of marked text are those of transformers 5.23
(`apply_chat_template` with `sanitize_control_tokens`). With earlier versions, rows with control tokens fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

from actors.engine.errors import UserError

UNCLEAR = (
    "it is unclear whether the template or the row's text wrote a control token: remove control tokens from the text, "
    "or set input.special_tokens: parse"
)
START, END = "\U000f0000", "\U000f0001"  # transformers' markers before and after a control token


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return text -> id of all special tokens, with or without a role such as EOS. They decode to no text."""
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return named | {one.content: token for token, one in tokenizer.added_tokens_decoder.items() if one.special}


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the added tokens that its chat template writes."""

    def __init__(self, tokenizer: Any) -> None:
        template = str(tokenizer.chat_template or "")
        added = tokenizer.added_tokens_decoder.values()
        texts = [one.content for one in added if one.special or (one.content.strip() and one.content in template)]
        either = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
        self.tokenizer = tokenizer
        self.pattern = re.compile(f"({either})")
        self._marked = re.compile(f"{START}(?:{either}){END}|(?:{either})")

    def prompt(
        self, render: Callable[[Any], str], values: Any, *, source: str | None = None, parse: bool = False
    ) -> tuple[str, int]:
        """Render a prompt. Return the text and the number of control tokens that come from `values`.

        In the text, these control tokens are marked for `encode`.
        Raises UserError if it is unclear whether a control token comes from the template or from `values`.

        Args:
            render: Fills the template with `values`: messages, tools or columns.
            source: Source of the template. Control tokens that do not occur in it come from `values`. None: the
                template may write control tokens that its source does not contain.
            parse: Whether control tokens from `values` become tokens too. If so, the text has no markers.
        """
        text = render(values)
        if self.pattern.search(text) is None:
            return text, 0
        marked_values = self._mark(values)
        marked = text if marked_values == values else render(marked_values)
        written = self._written(marked)
        if _unmarked(marked) != _unmarked(text):
            marked = self._aligned(_unmarked(text), marked, written)
        if source is not None:
            marked = self._marked.sub(lambda found: found[0] if found[0] in source else _mark(found[0]), marked)
        spelled = marked.count(START)
        return (text if parse or not spelled else marked), spelled

    def encode(self, marked: str, *, special_tokens: bool) -> list[int]:
        """Return the token ids of a marked text. special_tokens: whether to add special tokens, e.g. BOS.

        Raises UserError if transformers is older than 5.23, which cannot encode a marked text, or if the tokenizer
        turns even plain text into a control token.
        """
        try:
            from transformers.utils.chat_template_utils import encode_marked_chat
        except ImportError:
            raise UserError(
                "control tokens in the row's text need transformers 5.23: remove them from the text, or set "
                "input.special_tokens: parse"
            ) from None
        try:
            ids: list[int] = encode_marked_chat(self.tokenizer, marked)
        except ValueError as error:
            raise UserError(f"control tokens in the row's text: {error}: remove them from the text") from None
        if not special_tokens:
            return ids
        bare, whole = (self.tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
        first = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return [*whole[:first], *ids, *whole[first + len(bare) :]]

    def _mark(self, value: Any) -> Any:
        """Mark the control tokens in all strings and dictionary keys of a nested value. Remove existing markers."""
        if isinstance(value, dict):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._mark, value))
        return self.pattern.sub(lambda one: _mark(one[0]), _unmarked(value)) if isinstance(value, str) else value

    def _written(self, marked: str) -> list[bool]:
        """Return, for each control token in `marked`, whether the template wrote it: then it has no markers."""
        written = []
        for found in self._marked.finditer(marked):
            written.append(not found[0].startswith(START))
            start, end = found.span()
            if written[-1] and (marked.endswith(START, 0, start) or marked.startswith(END, end)):  # only one marker
                raise UserError(UNCLEAR)
        return written

    def _aligned(self, text: str, marked: str, written: list[bool]) -> str:
        """Return `text`, which was rendered without markers, with markers around the control tokens of `values`.

        `text` and `marked` may differ, so they are aligned. written: the result of `_written(marked)`.
        """
        ours, theirs = self.pattern.split(text), self.pattern.split(_unmarked(marked))
        if len(written) != len(theirs) // 2:
            raise UserError(UNCLEAR)
        is_template = [False] * len(ours)
        for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
            for offset in range(block.size):
                if (block.b + offset) % 2:  # every second piece is a control token
                    is_template[block.a + offset] = written[(block.b + offset) // 2]
        return "".join(
            _mark(piece) if number % 2 and not is_template[number] else piece for number, piece in enumerate(ours)
        )


def _mark(token: str) -> str:
    return token if token.startswith(START) else f"{START}{token}{END}"


def _unmarked(text: str) -> str:
    return text.replace(START, "").replace(END, "")


def one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Drop all but one BOS at the start of `ids`: the tokenizer adds a BOS even if the text begins with one."""
    first = next((at for at, token in enumerate(ids) if token != tokenizer.bos_token_id), len(ids))
    return ids[max(0, first - 1) :]


@lru_cache(maxsize=4)
def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the cached `ControlTokens` of a loaded tokenizer."""
    return ControlTokens(tokenizer)
