"""Makes the configuration of each adaptation stage (job at full depth, tune, evaluate), and the final job file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError, flat
from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.adapt import LEARNING_RATE, LOSS, LOSS_OF_RESPONSES, TRAINING, AdaptConfig
from pipeline.config.job import JobConfig, RunScheduleConfig
from pipeline.config.load import dump_yaml, validated
from pipeline.config.tune import TuneConfig
from pipeline.input.files import InputFile
from pipeline.learn.evaluate.results import Line

KEPT = ("horizon", "decay", "power", "steps", "warmup", "keep_order", "prompt")  # all schedule keys but the depths
NOT_TRAINED_FOR = {"power": "power", "steps": "step"}  # schedule key that adapt cannot change -> the decay that uses it
SAMPLE, ASKED, ANSWERS, TRAIN = "sample.parquet", "asked.parquet", "full-depth", "train.parquet"
DEV, HELD_OUT = "dev.parquet", "held-out.parquet"  # DEV chooses the best training step, HELD_OUT the speed
CHECKPOINT, ADAPTER, BEFORE, AFTER, JOB_FILE = "checkpoint", "speed-adapter", "before", "after", "job.yaml"
STAGE_FILES = (SAMPLE, ASKED, ANSWERS, TRAIN, DEV, HELD_OUT, CHECKPOINT, ADAPTER, BEFORE, AFTER)
PROMPT_SHARE = 1 / 3  # prompts that take more of a job's time limit speed-ups to 3x, so `prompt: first` is tried too


@dataclass(frozen=True)
class Task:
    """An adaptation to run.

    source: name of the job file. files, schema: files and columns of the input. shape: all schedule keys but the
    depths, with values (see `schedule_shape`). inputs: digest of the list of input files.
    """

    config: JobConfig
    source: str
    folder: Path
    resolved: ResolvedCheckpoint
    files: list[InputFile]
    schema: pa.Schema
    shape: dict[str, Any]
    inputs: str

    @property
    def options(self) -> AdaptConfig:
        """The job's `adapt` section, or its defaults."""
        return self.config.adapt or AdaptConfig()

    @property
    def trained(self) -> Path:
        """The folder that training writes."""
        return self.folder / (ADAPTER if self.options.weights == "adapter" else CHECKPOINT)

    @property
    def rows(self) -> int:
        """Number of rows of the job's input."""
        return sum(file.rows for file in self.files)

    def prompt_policies(self, prompt_share: float) -> list[str]:
        """Return the prompt policies to train and evaluate. The default policy comes first.

        prompt_share: share of the job's time at full depth that is spent on prompts.
        """
        if self.options.prompt != "auto":
            return [self.options.prompt]
        further = ["first"] if prompt_share >= PROMPT_SHARE and self.config.schedule.prompt is None else []
        return list(dict.fromkeys([self.shape["prompt"], *further]))


def full_depth_job(config: JobConfig, resolved: ResolvedCheckpoint, folder: Path, asked: str = SAMPLE) -> JobConfig:
    """Return a job that answers each row of the file `asked` once, at full depth. Ids are made from row numbers."""
    folder = folder.resolve()  # absolute, because other nodes have other working directories
    whole = {"format": None, "id": None, "since": None, "changed": "error"}
    plain: dict[str, Any] = {"format": None, "keep": [], "token_ids": True, "cumulative_logprob": False}
    return config.model_copy(
        update={
            "input": config.input.model_copy(update={"path": [str(folder / asked)], **whole}),
            "output": config.output.model_copy(update={"path": str(folder / ANSWERS), **plain}),
            "model": config.model.model_copy(update={"path": pinned_path(config, resolved)}),
            "schedule": RunScheduleConfig.model_validate({"speedup": 1.0}),
            "sampling": config.sampling.model_copy(update={"n": 1}),
            "adapt": None,
        }
    )


def pinned_path(config: JobConfig, resolved: ResolvedCheckpoint) -> str:
    """Return a path of the job's checkpoint that all nodes can use. A path on the hub gets the resolved commit."""
    if isinstance(resolved.source, str) or resolved.source.commit is None:
        return config.model.path
    return f"{config.model.path.partition('@')[0]}@{resolved.source.commit}"


def schedule_shape(config: JobConfig, stored: ScheduleSpec | None) -> dict[str, Any]:
    """Return the schedule to train for, without its depths. Keys that the job leaves out come from `stored`.

    stored: the checkpoint's schedule. If neither the job nor `stored` sets a layer order (keep order), the order is
    measured. The warm-up is then measured too, unless the job sets it. Raises UserError if the job changes
    a key that `tune` lacks.
    """
    changes = {key: value for key, value in config.schedule.changes().items() if key in KEPT}
    start = stored or ScheduleSpec(keep_order=MEASURED)
    spec = start.overridden(changes)
    for key, decay in NOT_TRAINED_FOR.items():
        if spec.decay == decay and getattr(spec, key) != getattr(start, key):
            raise UserError(f"schedule.{key}: adapt can only train for {getattr(start, key)}; leave this key out")
    left_out = {*NOT_TRAINED_FOR, *({"warmup"} - changes.keys() if spec.keep_order == MEASURED else ())}
    return {key: value for key, value in spec.to_dict().items() if key in KEPT and key not in left_out}


def tune_config(task: Task, model: str, max_tokens: int, prompts: Sequence[str]) -> TuneConfig:
    """Return the recipe with which `tune` trains the local checkpoint `model`. Raises UserError for wrong options.

    max_tokens: limit of a pair's tokens if the job sets none. prompts: prompt policies to train, all equally.
    """
    adapt, own = task.options, prompts[0]
    also = [{"speedup": speed, "prompt": prompt} for prompt in prompts[1:] for speed in adapt.speedups if speed > 1]
    columns = {"prompt": "prompt", "train_reference": "response", "dev_reference": "response", "ended": "ended"}
    dev = DEV if (task.folder / DEV).exists() else HELD_OUT
    files = {"train": str(task.folder / TRAIN), "dev": str(task.folder / dev)}
    values: dict[str, Any] = {
        "model": {"path": model},
        "data": {**files, "max_tokens": max(4, adapt.max_tokens or max_tokens), **columns},
        "output": str(task.trained),
        "schedule": {"speedups": list(adapt.speedups), **task.shape, "prompt": own, "also": also},
        "loss": {**(LOSS if adapt.responses is None else LOSS_OF_RESPONSES), **adapt.loss},
        "adapter": adapt.adapter if adapt.weights == "adapter" else None,
        "training": {
            **TRAINING,
            "learning_rate": LEARNING_RATE[adapt.weights],
            "speeds_per_step": len(adapt.speedups),
            "bf16": task.config.model.dtype != "float32",
            **adapt.training,
        },
    }
    return validated(TuneConfig, values, "adapt")


def eval_values(
    task: Task, model: str, shape: Mapping[str, Any], prompts: Sequence[str], *, tuned: bool
) -> dict[str, Any]:
    """Return the keys of an evaluation file for the held-out rows, except `threads`, `cache_bytes` and `max_batch`.

    Sampling is greedy, because sampled answers differ even without a loss of quality.

    Args:
        model: Folder of the job's checkpoint.
        shape: The trained schedule without its depths.
        tuned: True: evaluate the trained checkpoint, compared with the job's checkpoint at full depth. False: evaluate
            the job's checkpoint, timed only once, because the choice of a speed does not use these times.
    """
    config, adapt = task.config, task.options
    whole = tuned and adapt.weights == "full"  # with a speed adapter, 1x already is the job's own checkpoint
    path = {"path": str(task.trained) if whole else model}
    adapter = {"speed_adapter": str(task.trained)} if tuned and not whole else {}
    greedy = {"temperature": 0.0, "n": 1, "logprobs": None}
    return {
        "data": {"path": str(task.folder / HELD_OUT), "references": adapt.references and "references"},
        "model": {**config.model.model_dump(), **path, **adapter},
        "reference_model": model if whole else None,
        "output": str(task.folder / (AFTER if tuned else BEFORE)),
        "schedule": shape,
        "speedups": sorted({1.0, *adapt.speedups}),
        "prompts": list(prompts),
        "sampling": {**config.sampling.model_dump(), **greedy},
        "choices": None if config.choices is None else list(config.choices),
        "runs": adapt.runs if tuned else 1,
        "storage": config.storage.model_dump(),
    }


def tuned_model(task: Task) -> dict[str, str]:
    """Return `model` keys for the final job file: the trained checkpoint, or the job's checkpoint and a new adapter.

    The path of the trained files is relative if `model.path` in the user's job file is a relative local path.
    """
    relative = isinstance(task.resolved.source, str) and not Path(task.config.model.path).is_absolute()
    own = str(task.trained if relative else task.trained.resolve())
    is_adapter = task.options.weights == "adapter"
    return {"path": pinned_path(task.config, task.resolved), "speed_adapter": own} if is_adapter else {"path": own}


def job_text(task: Task, values: Mapping[str, Any], chosen: Line, metric: str, tolerance: float, path: Path) -> str:
    """Return the new job file `path`: the user's job file (`values`) at the chosen speed, without `adapt`."""
    score = chosen.scores[metric]
    comment = [
        f"Written by `skipdecode adapt {task.source}`: the same job at the fastest speed within the tolerance.",
        f"At {chosen.name}, {metric} loses {score.loss:.3g} on held-out rows of the job's input (upper end of "
        f"the loss's interval: {score.loss_high:.3g}; tolerance: {tolerance:g}).",
        f"The job answers all rows, including those of {task.folder / SAMPLE}. Run it: "
        f"skipdecode run {shlex.quote(str(path))}",
    ]
    schedule = {"speedup": chosen.nominal} | ({} if chosen.prompt == "full" else {"prompt": chosen.prompt})
    job = {**values, "model": {**values["model"], **tuned_model(task)}, "schedule": schedule}
    job.pop("adapt", None)
    return "".join(f"# {flat(line)}\n" for line in comment) + dump_yaml(job)
