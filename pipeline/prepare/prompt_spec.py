"""Holds the settings that turn rows into prompts, and finds mistakes in them that would make every row fail."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from functools import cached_property

from actors.control_tokens import special_tokens
from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import Reasoning
from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens, settings_not_followed
from actors.engine.types import SamplingParams
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.input import InputConfig
from pipeline.config.job import JobConfig
from pipeline.messages import counted
from pipeline.prepare.chat import Chat, check_chat, check_tools
from pipeline.prepare.row_settings import BATCH_COLUMNS
from pipeline.prepare.templates import is_template, template_columns
from pipeline.prepare.tokenizer import Source, longest, shown_path, tokenize_labels, tokenizer_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSpec:
    """Settings that turn rows into prompts.

    Args:
        checkpoint: Checkpoint whose tokenizer is used.
        vocab_size: Number of tokens in the model's vocabulary.
        context_length: Maximum number of tokens of prompt and answer together.
        input: Section `input` of the job. It names the columns of prompts and of settings that override the job's.
        sampling: The job's sampling parameters.
        choices: The job's labels; () for free text.
        output_format: Format of the job's answers; None for free text.
        now: Time when the job was planned, in seconds since 1970. Chat templates may print it.
    """

    checkpoint: Source
    vocab_size: int
    context_length: int
    input: InputConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: tuple[str, ...] = ()
    output_format: OutputFormat | None = None
    now: float = 0.0

    @cached_property
    def chat(self) -> Chat | None:
        """Return the settings that the job adds to the messages of each row; None if prompts are not chats."""
        section = self.input
        examples = tuple((example.user, example.assistant) for example in section.examples)
        chat = Chat(section.system, examples, section.chat_template_kwargs, section.continue_final, self.now)
        return chat if section.is_chat else None


def prompt_spec(config: JobConfig, resolved: ResolvedCheckpoint, planned: float) -> PromptSpec:
    """Return the spec of a job. planned: time when the job was planned, in seconds since 1970."""
    return PromptSpec(
        checkpoint=resolved.pinned(),
        vocab_size=resolved.checkpoint.config.vocab_size,
        context_length=resolved.checkpoint.context_length,
        input=config.input,
        sampling=config.sampling.params(),
        choices=config.choices or (),
        output_format=config.output_format,
        now=planned,
    )


def check_spec(spec: PromptSpec) -> None:
    """Raise UserError if a setting (chat template, stop tokens, format, labels, lengths) would make every row fail."""
    tokenizer, context = tokenizer_of(spec.checkpoint), spec.context_length
    if spec.chat is not None and not (spec.input.is_batch and tokenizer.chat_template is None):
        check_chat(tokenizer, spec.chat, shown_path(spec.checkpoint))
    if spec.input.tools is not None:
        check_tools(tokenizer)
    outside = [token for token in spec.sampling.stop_token_ids if token >= spec.vocab_size]
    if outside:
        raise UserError(f"sampling.stop_token_ids: {outside[0]} lies outside the vocabulary of {spec.vocab_size}")
    if spec.output_format is not None:
        GrammarCompiler(tokenizer, spec.vocab_size, [tokenizer.eos_token_id or 0]).compile(spec.output_format)
    if spec.choices:
        ids = tokenize_labels(tokenizer, spec.choices)
        most = longest(spec.choices, ids)
        try:
            ChoiceTrie([ids[label] for label in spec.choices], [tokenizer.eos_token_id])
        except ValueError as error:
            raise UserError(f"choices: {error} (counted from 0)") from None
        if most + 1 >= context:
            raise UserError(
                f"choices: a label of {counted(most, 'token')} leaves prompts no room in a context of {context}"
            )
        first: dict[int, str] = {}
        alike = [label for label in spec.choices if first.setdefault(ids[label][0], label) != label]
        if alike or most >= 3 * min(map(len, ids.values())):
            pair = f"{first[ids[alike[0]][0]]!r} and {alike[0]!r} begin alike" if alike else "some are much longer"
            log.warning(
                "choices: %s: choice_probability, which counts only the tokens at which labels part, may be far from "
                "a label's share of the probability of all labels",
                pair,
            )
    elif spec.input.choices is None and spec.sampling.max_new_tokens >= context:
        asked = f"sampling.max_new_tokens = {spec.sampling.max_new_tokens}"
        if spec.input.too_long == "truncate_left":
            raise UserError(
                f"{asked} leaves truncated prompts no room in a context of {context}: lower it, or set input.too_long: "
                "error"
            )
        log.warning("%s, but prompt and answer together have at most %d tokens, the model's context", asked, context)


def check_generation(config: JobConfig, resolved: ResolvedCheckpoint) -> None:
    """Log settings of generation_config.json that the job does not follow. Warn of an end token behind each prompt.

    Raises UserError if the id of an end token lies outside the vocabulary.
    """
    folder, vocab_size = resolved.checkpoint.path, resolved.checkpoint.config.vocab_size
    tokenizer = tokenizer_of(resolved.pinned())
    ends = end_tokens(folder, tokenizer, vocab_size)
    if (not config.input.is_chat or config.input.is_batch) and (last := tokenizer("a")["input_ids"][-1]) in ends:
        log.warning(
            "%s: the tokenizer puts the end token %s behind each prompt that is no chat, so the answers may be empty: "
            "take it out of the post_processor in tokenizer.json",
            shown_path(resolved.pinned()),
            tokenizer.convert_ids_to_tokens(last),
        )
    left = settings_not_followed(folder, config.sampling.model_fields_set)
    if left and config.choices is None and config.input.choices is None:
        asked = ", ".join(f"{name}: {value}" for name, value in left.items())
        log.info("the job does not follow these settings of generation_config.json (see `sampling`): %s", asked)


def read_names(section: InputConfig) -> list[str]:
    """Return the names of the input columns that hold rows' prompts and settings, each name once.

    Raises UserError, with the template's key in the job file, if a template does not compile.
    """
    names = [section.prompt_column, section.messages]
    texts = [("system, examples", text) for text in section.chat_texts if is_template(text)]
    for key, text in [("template", section.template or ""), *texts]:
        try:
            names += template_columns(text)
        except UserError as error:
            raise UserError(f"input.{key}: {error}") from None
    own = section.sampling or {}
    names += [own] if isinstance(own, str) else own.values()
    names += [section.choices, *(section.output_format or {}).values(), section.tools]
    names += BATCH_COLUMNS if section.is_batch else ()
    return list(dict.fromkeys(name for name in names if name is not None))


def marks_of_thinking(config: JobConfig, resolved: ResolvedCheckpoint) -> dict[str, str] | None:
    """Return the texts that begin and end thinking, as arguments for `Reasoning`; None if answers have no thinking.

    With `reasoning: auto` the chat template gives the texts. Raises UserError if one of them is a special token.
    """
    if config.reasoning is None:
        return None
    tokenizer = tokenizer_of(resolved.pinned())
    if config.reasoning == "auto":
        template = tokenizer.get_chat_template() if config.input.is_chat and tokenizer.chat_template else ""
        marks = Reasoning.of_template(template)
    else:
        marks = Reasoning(**config.reasoning.model_dump())
    if marks is None:
        return None
    marks.check(special_tokens(tokenizer))
    return asdict(marks)
