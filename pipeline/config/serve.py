"""The file of `skipdecode serve`: every key, its unit and its default."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Section
from pipeline.config.job import (
    ActorsConfig,
    ModelConfig,
    ReasoningConfig,
    SamplingConfig,
    ScheduleConfig,
    StorageConfig,
)


class ServeScheduleConfig(ScheduleConfig):
    """The schedule of requests that name no `speed`."""

    unadapted: bool = Field(
        False, description="allow schedules that the checkpoint was not trained for; their text may be ruined"
    )


class ServeSamplingConfig(SamplingConfig):
    """Values of the parameters that a request leaves out."""

    max_new_tokens: int = Field(256, ge=1, lt=2**31, description="tokens, including the stop token")
    temperature: float = Field(1.0, ge=0, description="0 is greedy, otherwise at least 0.01")


class ReplicasConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "events_per_second": (
            1000,
            "each step's tokens are sent at once; a client that reads slowly gets fewer events",
        ),
        "target_requests": (None, "another replica starts above half of max_batch requests: set max_batch"),
        "max_waiting": (256, "256 answers wait, further requests get status 429; raise max or count"),
    }

    count: int | None = Field(None, ge=1, description="number of replicas; default 1 without min and max")
    min: int | None = Field(None, ge=1, description="least number of replicas, autoscaling")
    max: int | None = Field(None, ge=1, description="largest number of replicas, autoscaling")
    gpus: float = Field(0, ge=0, description="GPUs per replica")
    cpus: float | None = Field(None, gt=0, description="logical CPUs per replica; default its threads")
    threads: int | None = Field(
        None, ge=1, description="torch threads per replica; default CPUs of its node ÷ replicas there, on CPU"
    )
    cache_bytes: int | None = Field(
        None, ge=1, description="bytes of key/value cache of the answers in flight; default 1 GiB on CPU, 8 GiB a GPU"
    )
    max_batch: int = Field(64, ge=1, description="answers in flight at most; 256 more wait, above it status is 429")

    @model_validator(mode="after")
    def _fixed_or_range(self) -> ReplicasConfig:
        self.as_actors()
        return self

    def as_actors(self) -> ActorsConfig:
        """The same as a job's actors, for what plans memory."""
        names = ("count", "min", "max", "gpus", "cpus", "threads", "cache_bytes", "max_batch")
        return ActorsConfig(**{name: getattr(self, name) for name in names})


class HttpConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "haproxy": (False, "Ray Serve's own proxy is used"),
        "max_body_bytes": (8 * 2**20, "a request holds at most 8 MiB; answer longer ones by skipdecode run"),
    }

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 is every network")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    api_key_env: str | None = Field(
        None, min_length=1, description="environment variable that holds the API key; default: no key is asked for"
    )
    timeout_seconds: float = Field(600, gt=0, description="after which a request ends with status 504")


class ServeConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "batches": (None, "answer a batch file with `skipdecode run` and input.format: openai_batch")
    }

    model: ModelConfig
    name: str | None = Field(
        None, min_length=1, description="by which requests name the model; default: last part of model.path"
    )
    schedule: ServeScheduleConfig = Field(default_factory=ServeScheduleConfig)
    sampling: ServeSamplingConfig = Field(default_factory=ServeSamplingConfig)
    reasoning: ReasoningConfig | Literal["auto"] | None = Field(
        None,
        description="give thinking apart from the answer, as reasoning_content; {}: <think> and </think>; auto: the "
        "marks that the chat template writes, if any",
    )
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)

    @model_validator(mode="after")
    def _engine_serves(self) -> ServeConfig:
        if self.model.engine == "vllm" or self.model.vllm is not None:
            raise UserError("model.engine: vllm is for jobs; `vllm serve` with the add-on serves it (actors/README.md)")
        return self

    @model_validator(mode="after")
    def _int8_fits(self) -> ServeConfig:
        if self.model.weights is not None and self.replicas.gpus:
            raise UserError("model.weights: int8 is for CPUs: leave it out, or leave out replicas.gpus")
        return self

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.name or self.model.path.partition("@")[0].rstrip("/").rpartition("/")[2]
