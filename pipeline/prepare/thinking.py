"""The marks of thinking that a job splits from its answers."""

from __future__ import annotations

from dataclasses import asdict

from actors.engine.constraints.reasoning import Reasoning
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig
from pipeline.prepare.tokenizer import known_tokenizer, tokenizer_of


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
