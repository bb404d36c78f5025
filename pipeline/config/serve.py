"""Defines serving files (`skipdecode serve`): every key, its unit and its default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Section
from pipeline.config.job import (
    ActorsConfig,
    ModelConfig,
    ReasoningConfig,
    RunScheduleConfig,
    SamplingConfig,
    StorageConfig,
)


class ServeSamplingConfig(SamplingConfig):
    """Sampling parameters for requests that do not give them."""

    max_new_tokens: int = Field(256, ge=1, lt=2**31, description="maximum tokens of an answer, with its stop token")
    temperature: float = Field(1.0, ge=0, description="0 is greedy, otherwise at least 0.01")


class ReplicasConfig(ActorsConfig):
    """A replica is an actor that answers requests. If 256 requests wait already, a further request gets status 429."""


class HttpConfig(Section):
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all networks")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    api_key_env: str | None = Field(
        None, min_length=1, description="environment variable with the API key; default: no key"
    )
    timeout_seconds: float = Field(600, gt=0, description="seconds after which a request ends with status 504")


class ServeConfig(Section):
    model: ModelConfig
    name: str | None = Field(
        None, min_length=1, description="the model's name in requests; default: last part of model.path"
    )
    schedule: RunScheduleConfig = Field(default_factory=RunScheduleConfig)
    sampling: ServeSamplingConfig = Field(default_factory=ServeSamplingConfig)
    reasoning: ReasoningConfig | Literal["auto"] | None = Field(
        None,
        description="return thinking apart from the answer, as reasoning_content. {}: thinking is between <think> and "
        "</think>; auto: between the delimiters in the chat template, if it has any",
    )
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> ServeConfig:
        if self.model.engine == "vllm" or self.model.vllm is not None:
            raise UserError(
                "model.engine: vllm is for jobs; to serve with vLLM use `vllm serve` with the add-on (actors/README.md)"
            )
        if self.replicas.scheduler is not None:
            raise UserError("replicas.scheduler: a server always refills; leave it out")
        self.model.check_actors(self.replicas.gpus, "replicas")
        return self

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.name or self.model.path.partition("@")[0].rstrip("/").rpartition("/")[2]
