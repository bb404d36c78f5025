"""Job files as pydantic models: every key, its unit and its default. Reads no data, loads no model."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from actors.engine.errors import UserError, suggestion
from actors.engine.types import EngineName, SamplingParams
from pipeline.config.adapt import AdaptConfig
from pipeline.config.base import Endpoint, Place
from pipeline.config.base import Section as Section
from pipeline.config.labels import check_compatible, check_labels, labels_given

Decay = Literal["linear", "cosine", "power", "step", "constant"]
KeepOrder = Literal["paper", "even", "early_exit"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _many(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _sampling_columns(value: Any) -> Any:
    if isinstance(value, dict):
        known = [one.name for one in fields(SamplingParams)]
        for name, column in value.items():
            if name not in known:
                raise UserError(f"unknown parameter {name}; {suggestion(name, known)}")
            if not isinstance(column, str):
                raise UserError(f"{name} must name a column")
        if value:
            return value
    if value is None or (isinstance(value, str) and value):
        return value
    raise UserError("must name a struct column, or give columns as {parameter: column}")


Paths = Annotated[list[Place], BeforeValidator(_one_or_many), Field(min_length=1)]


Labels = Annotated[tuple[str, ...], BeforeValidator(labels_given), Field(min_length=1)]


class ExampleConfig(Section):
    user: str = Field(min_length=1, description="what the user says")
    assistant: str = Field(min_length=1, description="the answer wanted")


class InputConfig(Section):
    """A prompt is one of three: a column of text or token ids, a template, or a column of messages.

    `chat`, `system` and `examples` turn text into the last user message of a chat.
    """

    path: Paths = Field(description="Parquet file, folder, glob, or a list of these; local or s3://")
    id: str | None = Field(None, description="column carried along as `id`; none: ids from file and row number")
    prompt: str | None = Field(
        None, description="column of text, or of lists of token ids, taken as they are; default 'prompt'"
    )
    template: str | None = Field(
        None, description="Jinja2 template over the row's columns, nested ones as meta.question and tags[0]"
    )
    messages: str | None = Field(
        None, description="column of chats: list of struct with role and content (text, or parts of text), or as JSON"
    )
    chat: bool = Field(False, description="text becomes a user message; implied by system and examples")
    system: str | None = Field(
        None, min_length=1, description="system message of every chat, unless the row's messages have their own"
    )
    examples: list[ExampleConfig] = Field(
        default_factory=list, description="exchanges between the system message and each row's own messages"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="values for the checkpoint's chat template, such as enable_thinking"
    )
    sampling: Annotated[str | dict[str, str] | None, BeforeValidator(_sampling_columns)] = Field(
        None, description="a row's own sampling: a struct, map or JSON column, or {parameter: column}; null: the job's"
    )
    choices: str | None = Field(
        None, description="column of lists of labels, one of which answers the row; null: the job's choices"
    )
    too_long: Literal["error", "truncate_left"] = Field(
        "error", description="a prompt that leaves no room for one token: row error, or keep its last tokens"
    )

    since: Literal["last_success"] | None = Field(
        None, description="incremental runs: each takes the files that no successful run has, into a dated folder"
    )
    changed: Literal["error", "reprocess", "ignore"] = Field(
        "error",
        description="with since, a file that changed after it was answered: stop, answer it again, or keep its answers",
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> InputConfig:
        if self.since is None and self.changed != "error":
            raise UserError("changed is for incremental runs: give since: last_success too")
        given = [name for name in ("prompt", "template", "messages") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"give {given[0]} or {given[1]}, not both")
        if self.chat_template_kwargs and not self.is_chat:
            raise UserError("chat_template_kwargs is for chats: give messages, system, examples or chat: true")
        return self

    @property
    def prompt_column(self) -> str | None:
        """The column of prompts; None for a template or messages."""
        return None if self.template is not None or self.messages is not None else self.prompt or "prompt"

    @property
    def is_chat(self) -> bool:
        """Prompts go through the checkpoint's chat template."""
        return self.chat or self.messages is not None or self.system is not None or bool(self.examples)


class OutputConfig(Section):
    path: Place = Field(description="folder for the answers; local or s3://")
    keep: list[str] = Field(default_factory=list, description="input columns carried along, beside id")
    strip: bool = Field(True, description="take white space off both ends of the text")
    token_ids: bool = Field(False, description="write a column with the generated token ids")
    cumulative_logprob: bool = Field(False, description="write the sum of the tokens' log-probabilities, nats")


class ModelConfig(Section):
    renamed: ClassVar[dict[str, str]] = {"cuda_graphs": "model.engine: for cuda_graphs: true write engine: paged"}

    path: Place = Field(description="checkpoint: local folder, s3:// folder, or owner/name@revision on the hub")
    cache: Place | None = Field(
        None,
        description="folder on each node for fetched checkpoints; default $SKIPDECODE_CACHE, else ~/.cache/skipdecode",
    )
    dtype: Dtype = Field("bfloat16", description="weights, activations and cache")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where an actor sees a GPU")
    compile: bool = Field(
        False, description="torch.compile the layers, on a CPU in place of the kernels; needs a C++ compiler"
    )
    engine: EngineName = Field(
        "auto",
        description="paged: on a GPU, for Llama, Mistral without a window, Qwen2 and OPT, fused layers, CUDA graphs "
        "and a paged cache, not yet run on a GPU; library: the layers of transformers, on a CPU with kernels of this "
        "package; auto: library",
    )

    @model_validator(mode="after")
    def _compile_needs_library(self) -> ModelConfig:
        if self.compile and self.engine == "paged":
            raise UserError("compile and engine: paged exclude each other: the paged engine has kernels of its own")
        return self


class ScheduleConfig(Section):
    """Any key left out comes from the checkpoint's skipdecode.json, then from the defaults there."""

    speedup: float | None = Field(None, description="nominal, layers per token at full depth ÷ mean over the horizon")
    max_depth: int | None = Field(None, description="layers at position 0")
    min_depth: int | None = Field(None, description="layers from the horizon on")
    depths: list[int] | None = Field(None, description="layers at positions 0, 1, ...; the last holds on")
    horizon: int | None = Field(None, description="generated tokens over which depth falls")
    decay: Decay | None = Field(None, description="shape of the fall")
    power: float | None = Field(None, description="exponent of decay power")
    steps: int | None = Field(None, description="stairs of decay step")
    warmup: int | None = Field(None, description="lowest layers that always run")
    keep_order: KeepOrder | list[int] | None = Field(None, description="layers, most needed first")
    prompt: Literal["full", "first"] | None = Field(None, description="layers run over the prompt: all, or d(0)'s")

    def changes(self) -> dict[str, Any]:
        """Keys that the file sets, lists as tuples."""
        given = self.model_dump(exclude_none=True)
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class SamplingConfig(Section):
    """Names and defaults of `SamplingParams`; a row may have values of its own, see `input.sampling`."""

    max_new_tokens: int = Field(64, ge=1, lt=2**31, description="tokens, the stop token counted")
    min_new_tokens: int = Field(0, ge=0, lt=2**31, description="tokens before which nothing ends the row")
    temperature: float = Field(0.0, ge=0, description="0 is greedy, else 0.01 and above")
    top_k: int = Field(0, ge=0, lt=2**31, description="tokens; 0 is all")
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass")
    min_p: float = Field(0.0, ge=0, le=1, description="share of the likeliest token's probability")
    repetition_penalty: float = Field(1.0, gt=0, description="factor, over prompt and answer; 1 is none")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="logits, for tokens the answer holds; 0 is none")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="logits, each time the answer holds one; 0 is none")
    stop: Annotated[tuple[str, ...], BeforeValidator(_many)] = Field(
        (), description="string or list of strings; the text ends before the first of them"
    )
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_many)] = Field(
        (), description="further token ids that end a row"
    )
    ignore_eos: bool = Field(False, description="the model's own stop tokens end no row")
    n: int = Field(1, ge=1, lt=2**31, description="answers to each prompt, at most 1024")
    logprobs: int | None = Field(
        None, ge=0, description="likeliest tokens told of beside each drawn one in a column logprobs; none: no column"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers of the job")

    @model_validator(mode="after")
    def _fits_together(self) -> SamplingConfig:
        self.params()
        return self

    def params(self) -> SamplingParams:
        """What every row is answered with, unless it says otherwise; without the job's seed. ValueError if at odds."""
        return SamplingParams(**self.model_dump(exclude={"seed"}))


class ActorsConfig(Section):
    count: int | None = Field(None, ge=1, description="actors, fixed; default 1 if min and max are not given")
    min: int | None = Field(None, ge=1, description="actors, autoscaling, at least")
    max: int | None = Field(None, ge=1, description="actors, autoscaling, at most")
    gpus: float = Field(0, ge=0, description="GPUs an actor")
    cpus: float | None = Field(None, gt=0, description="logical CPUs an actor; default 0.5 on CPU, 1 with GPUs")
    wait_seconds: float = Field(
        600, ge=0, description="seconds to wait for a cluster to grow until the least number of actors fits"
    )
    threads: int | None = Field(None, ge=1, description="torch threads an actor; default cores ÷ actors on CPU")
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of key/value cache of the rows in flight; default 1 GiB on CPU, 8 GiB a GPU, with "
        "model.engine: paged what a GPU has free when the job is planned, beside weights and activations",
    )
    max_batch: int | None = Field(
        None, ge=1, description="rows in flight at most; default 64, with model.engine: paged on GPUs 512"
    )
    scheduler: Literal["lock_step", "refill"] | None = Field(
        None,
        description="lock_step: all rows of a batch begin together; refill: a row that has ended is replaced at once, "
        "for answers some of which are many times as long as most; default as the job's limits suggest: lock_step "
        "for choices or ignore_eos, and where max_new_tokens is at most 3 horizons and max_batch above 16; else refill",
    )

    @model_validator(mode="after")
    def _fixed_or_range(self) -> ActorsConfig:
        if self.count is not None and (self.min is not None or self.max is not None):
            raise UserError("give count, or min and max, not both")
        if (self.min is None) != (self.max is None):
            raise UserError("min and max go together")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UserError(f"min = {self.min} lies above max = {self.max}")
        return self

    @property
    def most(self) -> int:
        """Actors there can be at once."""
        return self.max or self.count or 1


class StorageConfig(Section):
    endpoint_url: Endpoint | None = Field(None, description="S3 endpoint; credentials only from the usual AWS places")
    region: str | None = Field(None, description="S3 region")
    retry_seconds: float = Field(
        300, ge=0, description="seconds for which a failing S3 call is tried again, with growing waits; 0 is one try"
    )
    contact_seconds: float = Field(
        20, ge=0, description="seconds of these for an S3 endpoint that has never answered while a job is planned"
    )

    def after_planning(self) -> StorageConfig:
        """The same for a job that runs: its driver has reached the endpoint, so that an outage may last longer."""
        return self.model_copy(update={"contact_seconds": self.retry_seconds})


class JobConfig(Section):
    renamed: ClassVar[dict[str, str]] = {"max_row_errors": "max_error_rate"}

    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    choices: Labels | None = Field(
        None,
        description="labels, or a .json file with a list of them, one of which answers each row; input.choices gives a "
        "row its own",
    )
    shared_prefix: bool = Field(True, description="compute the prompts' constant beginning once an actor")
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    shard_rows: int | None = Field(None, ge=1, description="rows; default min(4096, ceil(rows ÷ (4 × most actors)))")
    shard_bytes: int = Field(64 * 2**20, ge=1, description="uncompressed bytes of input a shard")
    max_error_rate: float = Field(0.01, ge=0, le=1, description="share of rows; above it the job exits 3")
    grace_seconds: float = Field(
        20, ge=0, description="after SIGTERM or SIGINT, for shards in flight to be finished; 0 drops them"
    )
    attempts: int = Field(
        3,
        ge=1,
        description="deaths of its process after which a batch is halved, a row alone an error, a load given up",
    )
    adapt: AdaptConfig | None = Field(None, description="how `skipdecode adapt` proceeds; `run` does not read it")

    @property
    def paged(self) -> bool:
        """Whether actors keep their cache in a GPU's pages, if the model's family has them."""
        return self.model.engine == "paged" and self.actors.gpus > 0 and self.model.device != "cpu"

    def rows_in_flight(self, has_pages: bool) -> int:
        """At most, in an actor. has_pages: whether the checkpoint's family has them."""
        return self.actors.max_batch or (512 if self.paged and has_pages else 64)

    @model_validator(mode="after")
    def _labels_alone(self) -> JobConfig:
        if self.choices is not None:
            check_labels(self.choices)
        if self.choices is not None or self.input.choices is not None:
            check_compatible(self.sampling.params())
        return self
