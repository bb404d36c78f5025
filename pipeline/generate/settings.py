"""A Generator's arguments as a job file or an evaluation recipe gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config.job import ModelConfig, SamplingConfig


def generator_settings(model: ModelConfig, sampling: SamplingConfig, choices: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of `Generator` that sections `model` and `sampling` and key `choices` fix."""
    return {
        "sampling": sampling.model_dump(exclude={"seed"}),
        "seed": sampling.seed,
        "choices": choices,
        "dtype": model.dtype,
        "device": model.device,
        "compile": model.compile,
        "engine": model.engine,
    }
