"""Restricts answers to a JSON Schema, a regular expression or a grammar, with the library llguidance.

https://github.com/guidance-ai/llguidance computes the allowed tokens. A format is compiled once to a matcher, and each
row gets a copy of the matcher. A row ends when no token can follow. Where an answer may end, the end tokens are
allowed too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.engine.constraints.constraint import Bits
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError, flat

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase


class GrammarCompiler:
    """Compiles answer formats for one tokenizer.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Number of the model's token ids.
        stop_ids: One or more tokens that end an answer.

    Raises:
        UserError: The tokenizer does not give the bytes of its tokens, or the model has no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_ids: Collection[int]) -> None:
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if not stop_ids:
            raise UserError("output_format: the model has no end token: set eos_token_id in generation_config.json")
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError("output_format: needs the bytes of tokens: use a checkpoint with a tokenizer.json")
        self.stop_ids = frozenset(stop_ids)
        vocabulary = max(vocab_size, len(tokenizer))
        try:
            self.tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(self.stop_ids))
        except ValueError as error:
            raise UserError(f"output_format: this tokenizer is not supported: {flat(error)}") from None

    def compile(self, form: OutputFormat) -> Grammar:
        """Compile an answer format to a constraint. Raises UserError if the format is wrong or not supported."""
        from llguidance import LLMatcher, LLParserLimits

        form.check()
        limits = LLParserLimits(verbose_errors=False)  # verbose messages contain the parser's state
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(form.lark()), log_level=0, limits=limits)
        if matcher.is_error():
            raise UserError(f"{form.kind}: {flat(matcher.get_error())}")
        return Grammar(self, form, matcher)


class Grammar:
    """A compiled answer format; see `Constraint` for the methods."""

    most_tokens = None

    def __init__(self, compiler: GrammarCompiler, form: OutputFormat, matcher: LLMatcher) -> None:
        self.name, self.lark = form.kind, form.lark()
        self.stop_ids = compiler.stop_ids
        self._tokenizer, self._matcher = compiler.tokenizer, matcher

    def begin(self) -> GrammarProgress:
        return GrammarProgress(self._matcher.deep_copy(), self.stop_ids)

    def text(self, tokens: Sequence[int], label: int | None) -> str:
        """Return the text of `tokens`. An incomplete character at the end becomes U+FFFD."""
        return bytes(self._tokenizer.decode_bytes(list(tokens))).decode(errors="replace")


class GrammarProgress:
    """The progress of one row's answer through its grammar; see `AllowedTokens` for the methods."""

    scored = False
    label = None
    ends = ()

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher, self._stop_ids = matcher, stop_ids

    @property
    def error(self) -> str | None:
        matcher = self._matcher
        if not matcher.is_stopped() or matcher.is_accepting():
            return None
        return flat(matcher.get_error() or matcher.stop_reason())

    def allows(self, token: int) -> bool:
        if token in self._stop_ids:
            return self.is_complete()
        return bool(self._matcher.validate_tokens([token]) == 1)

    def write(self, bits: Bits) -> None:
        bits[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32, count=len(bits))

    def advance(self, token: int) -> bool:
        if token in self._stop_ids:
            return self.is_complete()
        return bool(self._matcher.consume_token(token)) and self._matcher.is_stopped() and self.is_complete()

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())
