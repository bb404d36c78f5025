"""Converts prompts (text, token ids or messages) to engine requests, and completions to texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from actors.answers import Prompt
from actors.chat_content import Forms, content_forms, in_forms
from actors.control_tokens import control_tokens, one_bos, special_tokens
from actors.engine.constraints.constraint import Constraint
from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import AfterReasoning, Reasoning
from actors.engine.errors import UserError, flat
from actors.engine.sampling.stopping import StopStrings
from actors.engine.types import Completion, FinishReason, Request, SamplingParams, check_compatible, row_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEPT_CONSTRAINTS = 64  # maximum number of constraints in the cache
KEPT_CHARACTERS = 2**20  # maximum number of characters of the formats and labels in the cache


class RequestBuilder:
    """Builds engine requests for one model. For the other arguments see `Generator`.

    `sampling`, `choices`, `output_format` and `seed` are defaults for rows that do not set these. Raises UserError if
    labels cannot be distinguished, output_format is wrong or unsupported, or both choices and output_format are given.

    Args:
        vocab_size: Number of token ids of the model.
        stop_ids: The model's end tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        choices: Sequence[str] | None,
        output_format: OutputFormat | None,
        *,
        seed: int,
        strip: bool,
        vocab_size: int,
        stop_ids: Collection[int],
        reasoning: Reasoning | None = None,
        row_logprobs: bool = False,
    ) -> None:
        self.tokenizer, self.sampling, self.seed, self.strip = tokenizer, sampling, seed, strip
        self.vocab_size, self.stop_ids = vocab_size, frozenset(stop_ids)
        self.has_logprobs = row_logprobs or sampling.logprobs is not None
        self.special_ids = special_tokens(tokenizer)
        self.token_text = lru_cache(2**16)(self._token_text)
        self.choices = None if choices is None else tuple(choices)
        self.output_format, self.reasoning = output_format, reasoning
        self._compiler: GrammarCompiler | None = None
        self._constraints: dict[tuple[str, ...] | OutputFormat, Constraint] = {}
        if self.choices is not None and len(self.choices) == 1:
            raise UserError(f"choices: {self.choices[0]!r} is the only label; give two or more")
        if self.choices is not None and output_format is not None:
            raise UserError("give choices or output_format, not both")
        if reasoning is not None:
            reasoning.check(self.special_ids)
        for form in (self.choices, output_format):
            if form is not None:
                self._constraint(form)

    def logprobs(self, completion: Completion) -> list[dict[str, Any]] | None:
        """Return a completion's log-probabilities, see `TokenLogprob.to_dict`; None if they were not asked for."""
        found = completion.logprobs
        return None if found is None else [token.to_dict(self.token_text) for token in found]

    def _token_text(self, token: int) -> str:
        """Return a token's text, also of a special token, with the space that decoding drops at a text's beginning."""
        once, twice = (str(self.tokenizer.decode([token] * count)) for count in (1, 2))
        return twice[len(once) :]

    def prompt(self, value: Any) -> Prompt:
        """Convert `value` (a text, token ids or messages) to a `Prompt`."""
        ids: list[int] = []
        error = None
        try:
            if isinstance(value, str) and value.strip():
                ids = self._ids(value, True)
            elif value is None or isinstance(value, str) or len(value) == 0:
                error = "prompt is null or empty"
            elif isinstance(value, bytes | bytearray):
                error = "prompt is bytes, not text: decode it"
            elif isinstance(value[0], Mapping):
                control = control_tokens(self.tokenizer)
                text, marked = control.prompt(self._render, list(map(dict, value)))
                ids = control.encode(text, special_tokens=False) if marked else self._ids(text, False)
            elif all(not isinstance(token, bool) and token == int(token) >= 0 for token in value):
                ids = [int(token) for token in value]
            else:
                error = "prompt holds values that are not token ids"
        except UserError as problem:
            error = str(problem)
        except Exception as problem:  # a chat template may raise any exception
            error = f"prompt cannot be read: {flat(problem)}"
        return Prompt(ids, f"prompt:{ids}", 0, error)

    def _render(self, messages: list[Any]) -> str:
        """Render messages with the tokenizer's chat template."""
        return self._templated(in_forms(messages, self._forms))

    @cached_property
    def _forms(self) -> Forms:
        return content_forms(self._templated)

    def _templated(self, messages: list[Any]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return one_bos(self.tokenizer, ids)

    def requests(self, prompt: Prompt) -> list[Request]:
        """Return the row's `n` requests. Raises UserError if the row cannot be answered."""
        if prompt.error is not None:
            raise UserError(prompt.error)
        params = self._params(prompt)
        form = self._form(prompt)
        constraint = None
        if form is not None:
            check_compatible("output_format" if isinstance(form, OutputFormat) else "choices", params)
            constraint = self._constraint(form)
            if isinstance(constraint, AfterReasoning) and constraint.reasoning.is_over(self._end(prompt.ids)):
                constraint = constraint.inner
        ending = None
        if params.stop:
            start = self.answer_start(prompt.ids)
            ending = StopStrings(params.stop, self.decode, self.special_ids.values(), params.min_new_tokens, start)
        seed = self.seed if params.seed is None else params.seed
        keys = [row_key(seed, prompt.source, prompt.row, sample) for sample in range(params.n)]
        return [Request(prompt.ids, params, key, ending, constraint) for key in keys]

    def _params(self, prompt: Prompt) -> SamplingParams:
        """Return the row's checked sampling parameters. A stop string that is a special token becomes a stop token."""
        try:
            params = self.sampling.merged(prompt.sampling)
        except ValueError as error:
            raise UserError(f"sampling: {error}") from None
        if params.logprobs is not None and not self.has_logprobs:
            raise UserError("sampling: logprobs needs an output column: set logprobs for the job too (0 is enough)")
        for name, ids in (("sampling: stop_token_ids", params.stop_token_ids), ("prompt", prompt.ids)):
            if ids and max(ids) >= self.vocab_size:
                raise UserError(f"{name}: token {max(ids)} lies outside the model's vocabulary of {self.vocab_size}")
        special = [self.special_ids[text] for text in params.stop if text in self.special_ids]
        if special:  # a search in the answer's text would not find them, because special tokens decode to no text
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
        return params

    def _form(self, prompt: Prompt) -> tuple[str, ...] | OutputFormat | None:
        """Return the row's labels or output format; if it sets neither, the default of all rows."""
        if prompt.choices is not None:
            return tuple(prompt.choices)
        if prompt.output_format is not None:
            return prompt.output_format
        return self.output_format if self.choices is None else self.choices

    def _constraint(self, form: tuple[str, ...] | OutputFormat) -> Constraint:
        """Return the cached constraint for labels or an output format. Raises UserError if `form` is not supported."""
        if form not in self._constraints:
            constraint = self._grammar(form) if isinstance(form, OutputFormat) else self._trie(form)
            if self.reasoning is not None:
                constraint = AfterReasoning(
                    constraint, self.reasoning, self.decode, self.stop_ids, self.special_ids.values()
                )
            self._constraints[form] = constraint
            sizes = [
                len(kept.text) if isinstance(kept, OutputFormat) else sum(map(len, kept)) for kept in self._constraints
            ]
            while len(sizes) > 1 and (len(sizes) > KEPT_CONSTRAINTS or sum(sizes) > KEPT_CHARACTERS):
                self._constraints.pop(next(iter(self._constraints)))
                sizes.pop(0)
        return self._constraints[form]

    def _grammar(self, form: OutputFormat) -> Constraint:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self.vocab_size, self.stop_ids)
        return self._compiler.compile(form)

    def _trie(self, labels: tuple[str, ...]) -> ChoiceTrie:
        ids = [self.tokenizer(label, add_special_tokens=False)["input_ids"] for label in labels]
        for label, tokens in zip(labels, ids, strict=True):
            if tokens and max(tokens) >= self.vocab_size:
                raise UserError(f"choices: {label!r} holds a token outside the model's vocabulary of {self.vocab_size}")
        try:
            return ChoiceTrie(ids, sorted(self.stop_ids), labels)
        except ValueError as error:
            raise UserError(f"choices: {error} (counted from 0)") from None

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def answer_start(self, prompt_ids: Sequence[int]) -> Callable[[str], int | None]:
        """Return a function that finds where in a text the answer begins, after any thinking; see `StopStrings`."""
        if self.reasoning is None:
            return lambda text: 0
        return partial(self.reasoning.answer_start, begun=self.reasoning.begun_by(self._end(prompt_ids)))

    def begins_thinking(self, request: Request) -> bool:
        """Return whether the answer's first token belongs to the model's thinking.

        It does if the prompt ends with the opening mark, or if labels or a format apply only after thinking.
        """
        if self.reasoning is None:
            return False
        return isinstance(request.constraint, AfterReasoning) or self.reasoning.begun_by(self._end(request.prompt_ids))

    def _end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text after a prompt's last special token, not counting special tokens at the prompt's end.

        In a chat, the template wrote this text, not the user.
        """
        special, kept = set(self.special_ids.values()), list[int]()
        for token in reversed(prompt_ids):
            if token not in special:
                kept.append(token)
            elif kept:
                break
        return self.decode(kept[::-1])

    def text(self, request: Request, completion: Completion) -> tuple[str, str | None]:
        """Return the answer's text, without a stop token or stop string at its end, and the thinking or None.

        `strip` applies to thinking and to free text, not to text in an output format.
        """
        tokens, stop_ids = list(completion.token_ids), request.sampling.all_stop_ids(self.stop_ids)
        if completion.finish_reason != FinishReason.LENGTH and tokens[-1] in stop_ids:
            tokens.pop()
        thinking: str | None = None
        if isinstance(request.constraint, AfterReasoning):
            thinking, text = request.constraint.split(tokens, completion.choice)
        elif request.constraint is not None:
            text = request.constraint.text(tokens, completion.choice)
        else:
            text = self.decode(tokens) if request.ending is None else request.ending.cut(tokens)
            if self.reasoning is not None:
                thinking, text = self.reasoning.split(text, begun=self.begins_thinking(request))
            text = text.strip() if self.strip else text
        return text, thinking.strip() if self.strip and thinking is not None else thinking

    def error(self, completion: Completion, text: str) -> str | None:
        """Return why there is no answer, or why `text` does not complete the requested format; else None."""
        if (error := completion.error) is None:
            return None
        blank = len(text) - len(text.rstrip())
        if completion.finish_reason == FinishReason.LENGTH and blank > len(text) / 2:
            share = "all" if blank == len(text) else "most"
            return (
                f"{error.partition(':')[0]}: cut off after {len(completion.token_ids)} tokens: {share} of its text is "
                "white space, so a higher max_new_tokens would not help"
            )
        return error
