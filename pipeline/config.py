"""Job and tune files as pydantic models: every key, its unit and its default. Reads no data, loads no model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

Decay = Literal["linear", "cosine", "power", "step", "constant"]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of a file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[str], BeforeValidator(_one_or_many), Field(min_length=1)]


class InputConfig(Section):
    path: Paths = Field(description="Parquet file, folder, glob, or a list of these; local or s3://")
    id: str | None = Field(None, description="column carried along as `id`; none: ids from file and row number")
    prompt: str | None = Field(None, description="column that holds the prompt; default 'prompt' without a template")
    template: str | None = Field(None, description="Jinja2 template over the row's columns, instead of a prompt column")
    too_long: Literal["error", "truncate_left"] = Field(
        "error", description="a prompt that leaves no room for one token: row error, or keep its last tokens"
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> InputConfig:
        if self.prompt is not None and self.template is not None:
            raise ValueError("give prompt or template, not both")
        return self


class OutputConfig(Section):
    path: str = Field(description="folder for the answers; local or s3://")
    keep: list[str] = Field(default_factory=list, description="input columns carried along, beside id")
    token_ids: bool = Field(False, description="write a column with the generated token ids")
    cumulative_logprob: bool = Field(False, description="write the sum of the drawn tokens' log-probabilities, nats")


class ModelConfig(Section):
    path: str = Field(description="checkpoint folder")
    dtype: Dtype = Field("bfloat16", description="weights, activations and cache")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where an actor sees a GPU")
    compile: bool = Field(False, description="torch.compile the layers; needs a C++ compiler")


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
    keep_order: Literal["paper", "even"] | list[int] | None = Field(None, description="layers, most needed first")
    prompt: Literal["full", "first"] | None = Field(None, description="layers run over the prompt: all, or d(0)'s")

    def changes(self) -> dict[str, Any]:
        """Keys that the file sets, lists as tuples."""
        given = self.model_dump(exclude_none=True)
        return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


class SamplingConfig(Section):
    max_new_tokens: int = Field(64, ge=1, description="tokens, the stop token counted")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="tokens; 0 is all")
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers of the job")


class ActorsConfig(Section):
    count: int | None = Field(None, ge=1, description="actors, fixed; default 1 if min and max are not given")
    min: int | None = Field(None, ge=1, description="actors, autoscaling, at least")
    max: int | None = Field(None, ge=1, description="actors, autoscaling, at most")
    gpus: float = Field(0, ge=0, description="GPUs an actor")
    cpus: float | None = Field(None, gt=0, description="logical CPUs an actor; default 0.5 on CPU, 1 with GPUs")
    threads: int | None = Field(None, ge=1, description="torch threads an actor; default cores ÷ actors on CPU")
    cache_bytes: int | None = Field(
        None, ge=1, description="bytes of key/value cache of one batch; default 1 GiB on CPU, 8 GiB a GPU"
    )
    max_batch: int = Field(64, ge=1, description="rows a batch at most")

    @model_validator(mode="after")
    def _fixed_or_range(self) -> ActorsConfig:
        if self.count is not None and (self.min is not None or self.max is not None):
            raise ValueError("give count, or min and max, not both")
        if (self.min is None) != (self.max is None):
            raise ValueError("min and max go together")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} lies above max = {self.max}")
        return self

    @property
    def most(self) -> int:
        """Actors there can be at once."""
        return self.max or self.count or 1


class StorageConfig(Section):
    endpoint_url: str | None = Field(None, description="S3 endpoint; credentials only from the usual AWS places")
    region: str | None = Field(None, description="S3 region")
    retries: int = Field(8, ge=0, description="attempts of one S3 call after the first")


class JobConfig(Section):
    input: InputConfig
    output: OutputConfig
    model: ModelConfig
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    shard_rows: int | None = Field(None, ge=1, description="rows; default min(4096, ceil(rows ÷ (4 × most actors)))")
    shard_bytes: int = Field(64 * 2**20, ge=1, description="uncompressed bytes of input a shard")
    max_row_errors: float = Field(0.01, ge=0, le=1, description="share of rows; above it the job exits 3")
    attempts: int = Field(3, ge=1, description="starts of one actor process, and tries of a task whose process died")


class TuneModelConfig(Section):
    path: str | None = Field(None, description="checkpoint folder to start from")
    new: dict[str, Any] | None = Field(
        None, description="from scratch: model_type and the keys of its Hugging Face config, but vocab_size"
    )
    vocab_size: int = Field(2048, ge=300, description="entries of the byte-level BPE trained for a new model")

    @model_validator(mode="after")
    def _start(self) -> TuneModelConfig:
        if (self.path is None) == (self.new is None):
            raise ValueError("give path (a checkpoint) or new (sizes), one of them")
        if self.new is not None and "model_type" not in self.new:
            raise ValueError("new needs model_type, for example llama")
        return self


class TuneDataConfig(Section):
    train: Paths = Field(description="Parquet files with prompts and references")
    dev: Paths = Field(description="Parquet files for the dev-set loss")
    prompt: str = Field("prompt", description="prompt column")
    train_reference: str = Field("reference", description="column: a string, or a list of strings")
    dev_reference: str = Field("references", description="column: a string, or a list of strings")
    dev_rows: int = Field(256, ge=1, description="pairs of the dev set, evenly spread")
    max_tokens: int = Field(256, ge=4, description="tokens of prompt and response; longer pairs are left out")


class TuneScheduleConfig(Section):
    speedups: list[float] = Field([1.0], min_length=1, description="nominal; one is drawn for each batch")
    default: float | None = Field(None, description="nominal speed-up that jobs use unless they say; default the last")
    horizon: int | None = Field(None, ge=2, description="tokens; default the median response of the training data")
    decay: Decay = Field("linear", description="shape of the fall")
    warmup: int = Field(1, ge=1, description="lowest layers that always run")
    keep_order: Literal["paper", "even"] | list[int] = Field("paper", description="layers, most needed first")
    prompt: Literal["full", "first"] = Field("full", description="layers run over the prompt")


class TrainingConfig(Section):
    epochs: float = Field(1.0, gt=0, description="passes over the training pairs")
    max_steps: int = Field(-1, description="optimizer steps; -1: by epochs")
    batch_size: int = Field(64, ge=1, description="pairs a step")
    learning_rate: float = Field(1e-3, gt=0, description="peak; cosine to zero after the warm-up")
    warmup_steps: int = Field(50, ge=0, description="optimizer steps over which the rate rises")
    weight_decay: float = Field(0.01, ge=0, description="AdamW")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="probability mass spread over the vocabulary")
    bf16: bool = Field(True, description="autocast to bfloat16")
    seed: int = Field(0, ge=0, description="initial weights, order of pairs, drawn speeds")
    eval_steps: int = Field(200, ge=1, description="optimizer steps between dev-set losses")
    save_steps: int = Field(200, ge=1, description="optimizer steps between checkpoints to resume from")
    threads: int | None = Field(None, ge=1, description="torch threads; default all cores")


class TuneConfig(Section):
    model: TuneModelConfig
    data: TuneDataConfig
    output: str = Field(description="folder for the tuned checkpoint; resumable state in its _training folder")
    schedule: TuneScheduleConfig = Field(default_factory=TuneScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)


class EvalDataConfig(Section):
    path: Paths = Field(description="Parquet files with prompts and references")
    prompt: str = Field("prompt", description="prompt column")
    references: str = Field("references", description="column: a string, or a list of strings")
    limit: int | None = Field(None, ge=1, description="rows")


class EvalConfig(Section):
    data: EvalDataConfig
    model: ModelConfig
    output: str = Field(description="folder for the table and the answers")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    speedups: list[float] = Field([1, 2, 3, 4, 5], min_length=1, description="nominal, each evaluated")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    max_batch: int = Field(64, ge=1, description="rows a batch at most")
    threads: int | None = Field(None, ge=1, description="torch threads; default all cores")
    runs: int = Field(1, ge=1, description="times each speed is timed; the median is shown")


ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(kind: type[ConfigT], path: str | Path, changes: Sequence[str] = ()) -> ConfigT:
    """Read a YAML file and apply ``a.b=value`` changes.

    Raises ValueError of one line that names the file, the key and what to do.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold keys and values, such as `input:` and `output:`")
    for change in changes:
        _apply(values, change)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{path}: {_first_problem(kind, error)}") from None


def _apply(values: dict[str, Any], change: str) -> None:
    dotted, equals, text = change.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {change}: must look like section.key=value")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        value = text
    node = values
    for key in keys[:-1]:
        below = node.setdefault(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"--set {change}: {key} is not a section")
        node = below
    node[keys[-1]] = value


def _first_problem(kind: type[Section], error: ValidationError) -> str:
    problems = error.errors()
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    where = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "list[", "literal["))]
    key = ".".join(where)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        known = list(_section(kind, where[:-1]).model_fields)
        near = difflib.get_close_matches(where[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"unknown key {key}; {hint}{more}"
    if problem["type"] == "missing":
        return f"{key} is missing; give it a value{more}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool | None) else ""
    return f"{key}: {message[0].lower()}{message[1:]}{shown}{more}" if key else f"{message}{more}"


def _section(kind: type[Section], where: Sequence[str]) -> type[Section]:
    for name in where:
        below = kind.model_fields[name].annotation
        assert isinstance(below, type) and issubclass(below, Section)
        kind = below
    return kind
