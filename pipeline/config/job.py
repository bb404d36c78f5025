"""Defines job files: every key, its unit and its default."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, create_model, model_validator

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec, checked, key_types
from actors.engine.types import EngineName, SamplingParams, check_compatible, is_neutral
from pipeline.config.adapt import AdaptConfig
from pipeline.config.base import Endpoint, Place, Section
from pipeline.config.forms import Form, Labels, check_labels
from pipeline.config.input import InputConfig, one_or_many

Dtype = Literal["float32", "bfloat16", "float16"]
OutputFormat = Literal["parquet", "jsonl", "openai_batch"]
DEPTH_KEYS = ("speedup", "max_depth", "min_depth", "depths")  # keys of `schedule` that set depths
RESULT_NAMES = ("answers", "results", "errors")  # names, without suffix, of the files that output.format adds


def _many(value: Any) -> Any:
    return tuple(one_or_many(value)) if isinstance(value, str | list) else value


class ReasoningConfig(Section):
    start: str = Field("<think>", min_length=1, description="delimiter before thinking, in the answer or the prompt")
    end: str = Field("</think>", min_length=1, description="delimiter after thinking")


class OutputConfig(Section):
    path: Place = Field(description="folder for the answers; local or s3://")
    format: OutputFormat | None = Field(
        None,
        description="what a finished job writes besides its Parquet files. jsonl: answers.jsonl; openai_batch: "
        "results.jsonl and errors.jsonl (default if input.format is openai_batch)",
    )
    keep: list[str] = Field(default_factory=list, description="input columns to copy to the output, besides id")
    strip: bool = Field(True, description="remove white space at both ends of each answer")
    token_ids: bool = Field(False, description="write a column with the generated token ids")
    cumulative_logprob: bool = Field(False, description="write a column with the sum of token log-probabilities (nats)")


class ModelConfig(Section):
    path: Place = Field(description="checkpoint: local folder, s3:// folder, or owner/name@revision on the hub")
    speed_adapter: Place | None = Field(
        None,
        description="local or s3:// folder with the speed adapter (low-rank weights for speeds above 1x) that "
        "`skipdecode adapt` made for model.path; not loaded at 1x",
    )
    cache: Place | None = Field(
        None, description="folder for downloads; default $SKIPDECODE_CACHE, else ~/.cache/skipdecode"
    )
    dtype: Dtype = Field("bfloat16", description="type of weights, activations and KV cache")
    weights: Literal["int8"] | None = Field(
        None,
        description="int8: 8-bit weights in linear layers and head, with one scale per output channel; only on CPUs "
        "and with dtype bfloat16; fast with AVX512-VNNI. Default: as in dtype",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the actor has a GPU, else cpu")
    engine: EngineName = Field(
        "auto",
        description="what runs the model. builtin: transformers' layers; on a CPU with this package's kernels. "
        "vllm: vLLM with this package's add-on; its answers may differ from run to run. auto: vllm on a GPU if vLLM is "
        "installed (pip install 'skipdecode[vllm]'), else builtin",
    )
    vllm: dict[str, Any] | None = Field(
        None,
        description="arguments of vLLM's engine, with their Python names, such as max_model_len, quantization, or "
        "tensor_parallel_size: 4 (each actor then asks for 4 GPUs); implies engine: vllm",
    )

    def check_actors(self, gpus: float, section: str) -> None:
        """Raise UserError if actors with this number of GPUs cannot run the model."""
        if self.weights is not None and gpus:
            raise UserError(f"model.weights: int8 runs only on CPUs; leave it out, or leave out {section}.gpus")
        if self.device.startswith("cuda") and not gpus:
            raise UserError(f"model.device: {self.device} needs {section}.gpus, for example 1; else Ray hides the GPUs")

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        if self.vllm is not None and self.engine == "builtin":
            raise UserError("vllm cannot be combined with engine: builtin; leave one of them out")
        for key, conflicts in (("dtype", self.dtype != "bfloat16"), ("device", self.device == "cuda")):
            if self.weights is not None and conflicts:
                value = f"{key}: {getattr(self, key)}"
                raise UserError(f"weights: {self.weights} cannot be combined with {value}; leave {key} out")
        return self


_schedule_keys: dict[str, Any] = {
    key.name: (Union[(*key_types()[key.name], None)], Field(None, description=key.metadata["text"]))
    for key in fields(ScheduleSpec)
}
_Schedule: Any = create_model("_Schedule", __base__=Section, **_schedule_keys)


class ScheduleConfig(_Schedule):
    """The layers that run for each token, with the keys and types of `ScheduleSpec`.

    Defaults: the values in the checkpoint's skipdecode.json, or in `ScheduleSpec`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: checked(name, value) if name in key_types() and value is not None else value
            for name, value in values.items()
        }

    def changes(self) -> dict[str, Any]:
        """Return those keys of a schedule that the file sets."""
        return self.model_dump(exclude_none=True, include=set(key_types()))

    def without_depths(self) -> dict[str, Any]:
        """Return `changes` but for `DEPTH_KEYS`: what schedules of one job have in common at all speeds."""
        return {key: value for key, value in self.changes().items() if key not in DEPTH_KEYS}


class RunScheduleConfig(ScheduleConfig):
    """The schedule of a job or of a server."""

    unadapted: bool = Field(
        False, description="allow a schedule that the checkpoint was not trained for; the answers may be ruined"
    )


class SamplingConfig(Section):
    """Sampling parameters, with the names and defaults of `SamplingParams`. `input.sampling` overrides them per row."""

    max_new_tokens: int = Field(64, description="maximum tokens of an answer, with its stop token")
    min_new_tokens: int = Field(0, description="minimum tokens before an answer may end")
    temperature: float = Field(0.0, description="0 is greedy, otherwise at least 0.01")
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)] = Field(
        0, description="number of most likely tokens to sample from; 0 or -1: all"
    )
    top_p: float = Field(1.0, description="sample from the likeliest tokens with this total probability")
    min_p: float = Field(0.0, description="sample tokens with at least this share of the top probability")
    repetition_penalty: float = Field(1.0, description="penalty factor for tokens in prompt or answer; 1: none")
    presence_penalty: float = Field(
        0.0, description="amount subtracted from the logits of tokens that occur in the answer"
    )
    frequency_penalty: float = Field(
        0.0, description="amount subtracted from a token's logit for each occurrence in the answer"
    )
    stop: Annotated[tuple[str, ...], BeforeValidator(_many)] = Field(
        (), description="string or list of strings; an answer ends before the first one that occurs in it"
    )
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_many)] = Field(
        (), description="token ids that end an answer"
    )
    ignore_eos: bool = Field(False, description="do not end an answer at the model's own stop tokens")
    n: int = Field(1, description="answers per prompt, at most 1024")
    logprobs: int | None = Field(
        None, description="write a column logprobs with this many alternatives for each token; default: no column"
    )
    seed: int = Field(0, description="seed of the job's random numbers")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not is_neutral(name, value)}

    @model_validator(mode="after")
    def _in_range(self) -> SamplingConfig:
        SamplingParams(**self.model_dump())
        return self

    def params(self) -> SamplingParams:
        """Return the job's sampling parameters without the seed, which a row's own parameters may set."""
        return SamplingParams(**self.model_dump(exclude={"seed"}))


class ActorsConfig(Section):
    count: int | None = Field(None, ge=1, description="number of actors; default 1 unless min and max are set")
    min: int | None = Field(None, ge=1, description="minimum number of actors, with autoscaling")
    max: int | None = Field(None, ge=1, description="maximum number of actors, with autoscaling")
    gpus: float = Field(0, ge=0, description="GPUs per actor")
    cpus: float | None = Field(None, gt=0, description="logical CPUs per actor; default: one per thread")
    wait_seconds: float = Field(
        600,
        ge=0,
        description="seconds to wait for room in the cluster for the minimum number of actors; if this key is not "
        "set, a cluster with neither a GPU for them nor an autoscaler is refused at once",
    )
    threads: int | None = Field(
        None, ge=1, description="torch threads per actor; default on a CPU: CPUs of the node ÷ actors on the node"
    )
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of an actor's KV cache, which holds all rows in flight. Default: 1 GiB on a CPU; 8 GiB on a "
        "GPU; with engine vllm on a GPU, the memory that vLLM's gpu_memory_utilization leaves for it",
    )
    max_batch: int | None = Field(
        None,
        ge=1,
        description="maximum rows in flight in an actor. Default: 64; with engine vllm 256 on a CPU, and 1024 on a "
        "GPU, because skipping layers pays there only with many rows",
    )
    scheduler: Literal["lock_step", "refill"] | None = Field(
        None,
        description="lock_step: all rows of a batch begin together. refill: a row that has ended is replaced at "
        "once; this is faster if a few answers are much longer than most. Default: lock_step with choices or "
        "ignore_eos, or if max_new_tokens is at most 3 × horizon and max_batch is above 16; else refill",
    )

    @model_validator(mode="after")
    def _fixed_or_range(self) -> ActorsConfig:
        if self.count is not None and (self.min is not None or self.max is not None):
            raise UserError("give count, or min and max, not both")
        if (self.min is None) != (self.max is None):
            raise UserError("set both min and max, or neither")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UserError(f"min = {self.min} lies above max = {self.max}; lower min or raise max")
        return self

    @property
    def most(self) -> int:
        """Largest number of actors at the same time."""
        return self.max or self.count or 1


class StorageConfig(Section):
    endpoint_url: Endpoint | None = Field(None, description="S3 endpoint; give credentials in the usual AWS places")
    region: str | None = Field(None, description="S3 region")
    retry_seconds: float = Field(300, ge=0, description="seconds for which a failing S3 call is retried; 0: no retry")
    contact_seconds: float = Field(
        20, ge=0, description="seconds for which planning retries an S3 call if the endpoint has never answered"
    )

    def after_planning(self) -> StorageConfig:
        """Return settings for a running job: it retries longer, because planning has already reached the endpoint."""
        return self.model_copy(update={"contact_seconds": self.retry_seconds})


class JobConfig(Section):
    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    schedule: RunScheduleConfig = Field(default_factory=RunScheduleConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    choices: Labels | None = Field(
        None,
        description="two or more labels, as a list or .json file; every answer is one of them. For labels that "
        "differ from row to row, see input.choices",
    )
    output_format: Form | None = Field(
        None,
        description="form of every answer: {json_schema: object or .json file}, {regex: text} or {grammar: Lark text "
        "or .lark file}. For forms that differ from row to row, see input.output_format",
    )
    reasoning: ReasoningConfig | Literal["auto"] | None = Field(
        None,
        description="move thinking from the answer to a column `reasoning`; choices and output_format then apply to "
        "the text after thinking. {}: thinking is between <think> and </think>; auto: between the delimiters in the "
        "chat template, if it has any",
    )
    shared_prefix: bool = Field(
        True,
        description="compute a prefix that prompts of a shard share, such as a template's beginning or the examples of "
        "a category, only once; an actor keeps the last one",
    )
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    shard_rows: int | None = Field(
        None,
        ge=1,
        description="rows per shard, the unit of commit and progress. Default: a quarter of the rows per actor, but at "
        "most 256 (or max_batch, if this is larger); above 8,192 rows per actor, 1/32 of them, but at most 4,096",
    )
    shard_bytes: int = Field(64 * 2**20, ge=1, description="uncompressed input bytes per shard")
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="largest share of rows with an error; above it `run` ends with exit status 3"
    )
    grace_seconds: float = Field(
        20, ge=0, description="seconds that running shards have to finish after a signal; 0: stop them at once"
    )
    attempts: int = Field(
        3, ge=1, description="process deaths until a row that ran alone gets an error, or the job fails if no row ran"
    )
    price_per_hour: float | None = Field(
        None,
        gt=0,
        description="price of one device (a GPU, or an actor on CPUs) per hour; `plan` and the report show the cost",
    )
    adapt: AdaptConfig | None = Field(None, description="settings of `skipdecode adapt`; `run` ignores them")

    @property
    def result_format(self) -> OutputFormat:
        """Format of the files that the job writes besides its Parquet files; parquet if there are no such files."""
        return self.output.format or ("openai_batch" if self.input.is_batch else "parquet")

    @property
    def rows_in_flight(self) -> int:
        """Largest number of rows in flight in one actor."""
        default = 64 if self.model.engine != "vllm" else 1024 if self.actors.gpus else 256
        return self.actors.max_batch or default

    @property
    def devices(self) -> float:
        """Largest number of devices: GPUs of all actors together, or actors on CPUs."""
        return self.actors.most * (self.actors.gpus or 1)

    @model_validator(mode="after")
    def _fits_together(self) -> JobConfig:
        self.model.check_actors(self.actors.gpus, "actors")
        if self.output.format == "openai_batch" and not self.input.is_batch:
            raise UserError("output.format: openai_batch needs requests as input; set input.format: openai_batch")
        if self.choices is not None:
            check_labels(self.choices, 2)
        forms = {
            "choices": self.choices or self.input.choices,
            "output_format": self.output_format or self.input.output_format,
        }
        if all(forms.values()):
            raise UserError("give choices or output_format, not both")
        for name in filter(forms.get, forms):
            check_compatible(name, self.sampling.params())
        return self
