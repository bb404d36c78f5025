"""The settings by which each row becomes a prompt, and the checks that would fail for every row."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from actors.engine.constraints.grammar import GrammarCompiler
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import Reasoning
from actors.engine.errors import UserError
from actors.engine.model.end_tokens import end_tokens, settings_not_followed
from actors.engine.types import SamplingParams
from actors.tool_calls import form_of
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.prepare.batch_requests import COLUMNS
from pipeline.prepare.chat import Chat, check_chat
from pipeline.prepare.templates import is_template, template_columns
from pipeline.prepare.tokenizer import Source, known_tokenizer, longest, shown_path, tokenize_labels, tokenizer_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSpec:
    """How a row becomes a prompt, and which columns hold its own settings. One of column, template, messages and
    is_batch is set.

    Args:
        checkpoint: where the tokenizer is.
        vocab_size: tokens of the model's vocabulary.
        context_length: tokens of prompt and answer.
        column: column of prompts, text or token ids.
        template: Jinja template over the row's columns.
        messages: column of chat messages.
        chat: what a chat adds to the messages; None for plain text.
        sampling: the job's parameters.
        sampling_columns: a column of parameters, or parameter -> column; they override the job's.
        choices: the job's labels; () for free text.
        choices_column: column of the row's own labels, which override the job's.
        is_batch: rows are requests of an OpenAI batch file.
        output_format: form of the job's answers; None for free text.
        format_column: kind of form -> column of the row's own, which overrides the job's.
        tools: column of the tools that a chat offers; None for none.
        too_long: `error`, or `truncate_left`, which leaves room for the answer.
        special_tokens: whether control tokens that the input spells are text or parsed; None: parsed in prompts that
            come whole, of a column or a request, and text in chats and templates.
    """

    checkpoint: Source
    vocab_size: int
    context_length: int
    column: str | None = None
    template: str | None = None
    messages: str | None = None
    chat: Chat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_columns: str | Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    choices_column: str | None = None
    is_batch: bool = False
    output_format: OutputFormat | None = None
    format_column: Mapping[str, str] = field(default_factory=dict)
    tools: str | None = None
    too_long: str = "error"
    special_tokens: str | None = None


def prompt_spec(config: JobConfig, resolved: ResolvedCheckpoint, planned: float) -> PromptSpec:
    """The spec of a job. planned: when the job was planned, seconds since 1970; chat templates read it as the time."""
    inputs, checkpoint = config.input, resolved.checkpoint
    examples = tuple((example.user, example.assistant) for example in inputs.examples)
    return PromptSpec(
        checkpoint=known_tokenizer(resolved),
        vocab_size=checkpoint.config.vocab_size,
        context_length=checkpoint.context_length,
        column=inputs.prompt_column,
        template=inputs.template,
        messages=inputs.messages,
        chat=Chat(inputs.system, examples, inputs.chat_template_kwargs, inputs.continue_final, planned)
        if inputs.is_chat
        else None,
        sampling=config.sampling.params(),
        sampling_columns=inputs.sampling or {},
        choices=config.choices or (),
        choices_column=inputs.choices,
        is_batch=inputs.is_batch,
        output_format=config.output_format,
        format_column=inputs.output_format or {},
        tools=inputs.tools,
        too_long=inputs.too_long,
        special_tokens=inputs.special_tokens,
    )


def check_spec(spec: PromptSpec) -> None:
    """Raise UserError for a chat template, labels or lengths that would fail every row of the job."""
    if spec.chat is not None and not (spec.is_batch and tokenizer_of(spec.checkpoint).chat_template is None):
        check_chat(tokenizer_of(spec.checkpoint), spec.chat, shown_path(spec.checkpoint))
    if spec.tools is not None:
        form_of(tokenizer_of(spec.checkpoint))
    outside = [token for token in spec.sampling.stop_token_ids if token >= spec.vocab_size]
    if outside:
        raise UserError(f"sampling.stop_token_ids: {outside[0]} lies outside the vocabulary of {spec.vocab_size}")
    context = spec.context_length
    if spec.output_format is not None:
        tokenizer = tokenizer_of(spec.checkpoint)
        GrammarCompiler(tokenizer, spec.vocab_size, [tokenizer.eos_token_id or 0]).compile(spec.output_format)
    if spec.choices:
        tokenizer = tokenizer_of(spec.checkpoint)
        ids = tokenize_labels(tokenizer, spec.choices)
        most = longest(spec.choices, ids)
        try:
            ChoiceTrie([ids[label] for label in spec.choices], tokenizer.eos_token_id)
        except ValueError as error:
            raise UserError(f"choices: {error} (counted from 0)") from None
        if most + 1 >= context:
            raise UserError(f"choices: a label of {most} tokens leaves prompts no room in a context of {context}")
    elif spec.too_long == "truncate_left" and spec.sampling.max_new_tokens >= context:
        raise UserError(
            f"sampling.max_new_tokens = {spec.sampling.max_new_tokens} leaves truncated prompts no room in a context "
            f"of {context}: lower it, or set input.too_long: error"
        )


def check_generation(config: JobConfig, resolved: ResolvedCheckpoint) -> None:
    """Name once what the checkpoint's generation config asks for and the job does not follow.

    Raises UserError for an end token outside the vocabulary.
    """
    folder, vocab_size = resolved.checkpoint.path, resolved.checkpoint.config.vocab_size
    end_tokens(folder, tokenizer_of(known_tokenizer(resolved)), vocab_size)
    left = settings_not_followed(folder, config.sampling.model_fields_set)
    if left and not config.choices:
        asked = ", ".join(f"{name}: {value}" for name, value in left.items())
        log.warning("generation_config.json asks for what the job does not follow, see its sampling: %s", asked)


def read_names(
    column: str | None,
    template: str | None,
    messages: str | None,
    sampling: str | Mapping[str, str] | None,
    choices: str | None,
    is_batch: bool = False,
    output_format: Mapping[str, str] | None = None,
    tools: str | None = None,
    texts: Sequence[str] = (),
) -> list[str]:
    """Columns that a row's prompt, sampling and form come from, each once.

    texts: that may be templates, see `Chat`. Raises UserError, which names the text, for a wrong template.
    """
    prompt = [column, messages]
    for text, name in ((template, "template"), *((text, "system, examples") for text in texts if is_template(text))):
        try:
            prompt += [] if text is None else template_columns(text)
        except UserError as error:
            raise UserError(f"input.{name}: {error}") from None
    own = [sampling] if isinstance(sampling, str) else list((sampling or {}).values())
    requests = COLUMNS if is_batch else ()
    names = [*prompt, *own, choices, *(output_format or {}).values(), tools, *requests]
    return list(dict.fromkeys(name for name in names if name is not None))


def marks_of_thinking(config: JobConfig, resolved: ResolvedCheckpoint) -> dict[str, str] | None:
    """The job's marks by the names of `Reasoning`; None for none. `auto` takes those of the checkpoint's chat template.

    Raises UserError for a mark that is a special token.
    """
    if config.reasoning is None:
        return None
    tokenizer = tokenizer_of(known_tokenizer(resolved))
    if config.reasoning == "auto":
        template = tokenizer.get_chat_template() if config.input.is_chat and tokenizer.chat_template else ""
        marks = Reasoning.of_template(template)
    else:
        marks = Reasoning(**config.reasoning.model_dump())
    if marks is None:
        return None
    marks.check(tokenizer.all_special_tokens)
    return asdict(marks)
