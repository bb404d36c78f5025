"""Settings by which rows become prompts, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.types import SamplingParams
from pipeline.config.input import InputConfig
from pipeline.prepare.prompt_spec import PromptSpec


def spec_of(
    checkpoint: Path | str,
    context: int = 64,
    *,
    params: SamplingParams | None = None,
    choices: tuple[str, ...] = (),
    own_choices: str | None = None,
    output_format: OutputFormat | None = None,
    **section: Any,
) -> PromptSpec:
    """Return the spec of a job over a tiny checkpoint.

    section: keys of `input`, by default a column `prompt`; own_choices is its `choices`. params: the job's `sampling`.
    """
    keys = InputConfig.model_validate({"path": "in", "choices": own_choices, **section})
    return PromptSpec(str(checkpoint), 300, context, keys, params or SamplingParams(), choices, output_format)
