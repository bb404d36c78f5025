"""What a job file with `task: score` may set: a key that only generation reads is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from actors.engine.errors import UserError

if TYPE_CHECKING:
    from pipeline.config.job import JobConfig

_WITHOUT_MEANING = (
    *("sampling", "choices", "output_format", "reasoning", "adapt"),
    *("input.sampling", "input.choices", "input.output_format", "input.tools"),
    *("output.strip", "output.parse", "output.cumulative_logprob"),
    *("actors.scheduler", "schedule.exact", "model.kv_cache"),
)


def check_score(config: JobConfig) -> None:
    """Raise UserError that names a missing key, or one that has no meaning where texts are scored."""
    if config.input.is_batch:
        raise UserError("task: score does not go with input.format: openai_batch: its requests ask for answers")
    if config.input.continuations is None:
        raise UserError("task: score needs input.continuations: the column of texts to score")
    for name in _WITHOUT_MEANING:
        section, _, key = name.rpartition(".")
        holder: BaseModel = getattr(config, section) if section else config
        if key in holder.model_fields_set and getattr(holder, key) is not None:
            raise UserError(f"{name} has no meaning with task: score, which generates nothing; leave it out")
    if config.model.engine == "paged":
        raise UserError(
            "model.engine: paged only generates: its memory is planned for answers; leave it out, or write library"
        )
