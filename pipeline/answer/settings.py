"""Makes the arguments of `Generator` from sections of a job, serving or evaluation file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.engine.constraints.output_format import OutputFormat
from pipeline.checkpoints.resolve import fetch
from pipeline.config.job import ModelConfig, SamplingConfig


def generator_settings(
    model: ModelConfig,
    sampling: SamplingConfig,
    choices: Sequence[str] | None,
    output_format: OutputFormat | None = None,
) -> dict[str, Any]:
    """Return those arguments of `Generator` that `model`, `sampling`, `choices` and `output_format` determine."""
    return {
        "sampling": sampling.model_dump(exclude={"seed"}),
        "seed": sampling.seed,
        "choices": choices,
        "output_format": None if output_format is None else output_format.to_dict(),
        "dtype": model.dtype,
        "weights": model.weights,
        "device": model.device,
        "vllm": (model.vllm or {}) if model.engine == "vllm" else None,
    }


def fetched(generator: Mapping[str, Any], report: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Fetch checkpoint and speed adapter. Return the arguments with local folders in place of these sources."""
    sources = {name: generator[name] for name in ("checkpoint", "speed_adapter") if generator.get(name) is not None}
    return {**generator, **{name: str(fetch(source, report=report)) for name, source in sources.items()}}
