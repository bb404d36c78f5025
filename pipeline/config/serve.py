"""Defines serving files (`skipdecode serve`): every key, its unit and its default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Section
from pipeline.config.job import (
    ActorsConfig,
    JobConfig,
    ModelConfig,
    ReasoningConfig,
    RunScheduleConfig,
    SamplingConfig,
    StorageConfig,
)


class ServeConfig(Section):
    model: ModelConfig
    name: str | None = Field(
        None, min_length=1, description="the model's name in answers; default: last part of model.path"
    )
    schedule: RunScheduleConfig = Field(default_factory=RunScheduleConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    reasoning: ReasoningConfig | Literal["auto"] | None = Field(
        None, description="return thinking apart from the answer, as reasoning_content"
    )
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all networks")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    storage: StorageConfig = Field(default_factory=StorageConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> ServeConfig:
        traffic = "for traffic use `vllm serve` or Ray Serve LLM with the add-on (configs/recipes/vllm)"
        if self.model.engine == "vllm" or self.model.vllm is not None:
            raise UserError(f"model.engine: vllm is for jobs; {traffic}")
        if self.actors.most > 1:
            raise UserError(f"actors: `serve` has one replica: leave out count, min and max; {traffic}")
        self.model.check_actors(self.actors.gpus, "actors")
        return self

    def job(self) -> JobConfig:
        """Return the settings of a job that answers requests as the lines of an OpenAI batch file."""
        shared = self.model_dump(exclude={"name", "host", "port"}, exclude_unset=True)
        shared["model"]["engine"] = "builtin"
        paths = {"input": {"path": "requests", "format": "openai_batch"}, "output": {"path": "answers"}}
        return JobConfig.model_validate({**shared, **paths})
