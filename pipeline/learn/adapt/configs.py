"""Configurations that an adaptation makes: the full-depth job, the recipes of tune and evaluate, the job to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, flat
from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.adapt import LEARNING_RATE, LOSS, TRAINING, AdaptConfig
from pipeline.config.job import JobConfig, JobScheduleConfig
from pipeline.config.load import dump_yaml, validated
from pipeline.config.tune import TuneConfig
from pipeline.messages import install_command

KEPT = (
    "horizon",
    "decay",
    "power",
    "steps",
    "warmup",
    "keep_order",
    "prompt",
)  # of the schedule
CHECKS = ("min_agreement", "agreement_rows")  # keys of the user's schedule that the job file keeps
NOT_TRAINED_FOR = {"power": "power", "steps": "step"}  # key -> the decay that it shapes
SAMPLE, ANSWERS, TRAIN, HELD_OUT = "sample.parquet", "full-depth", "train.parquet", "held-out.parquet"
CHECKPOINT, ADAPTER, BEFORE, AFTER, JOB_FILE = "checkpoint", "speed-adapter", "before", "after", "job.yaml"
PROMPT_SHARE = 1 / 3  # of a job's time: without skipping in the prompt, no speed gains more than 3x
STAGE_FILES = (SAMPLE, ANSWERS, TRAIN, HELD_OUT, CHECKPOINT, ADAPTER, BEFORE, AFTER)  # files and folders of the stages


def options(config: JobConfig) -> AdaptConfig:
    """The job's `adapt` section, or its defaults."""
    return config.adapt or AdaptConfig()


def output_folder(config: JobConfig) -> Path:
    """The adaptation's folder. Raises UserError if it is not local."""
    folder = options(config).output or f"{config.output.path.rstrip('/')}-adapt"
    if "://" in folder:
        raise UserError(f"adapt.output: {folder} is not local, and training writes local files: name a local folder")
    return Path(folder)


def prompt_policies(config: JobConfig, shape: Mapping[str, Any], prompt_share: float) -> list[str]:
    """The prompt policies to train and evaluate, the checkpoint's own first.

    prompt_share: of the prompts in the seconds of the job at full depth.
    """
    wanted = options(config).prompt
    if wanted != "auto":
        return [wanted]
    further = ["first"] if prompt_share >= PROMPT_SHARE and config.schedule.prompt is None else []
    return list(dict.fromkeys([shape["prompt"], *further]))


def trains_adapter(config: JobConfig) -> bool:
    """Whether a speed adapter is trained, and not all weights."""
    return options(config).weights == "adapter"


def trained(config: JobConfig) -> str:
    """Name of the folder that training writes."""
    return ADAPTER if trains_adapter(config) else CHECKPOINT


def check_installed(config: JobConfig) -> None:
    """Raise UserError that names a missing package of tune or evaluate; none is imported."""
    packages = ["sacrebleu", "rouge_score", "matplotlib", *(["peft"] if trains_adapter(config) else [])]
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed: {install_command('tune,eval')}")


def full_depth_job(config: JobConfig, resolved: ResolvedCheckpoint, folder: Path) -> JobConfig:
    """The same job over the sample, every token through all layers, one answer a row, ids by row number."""
    folder = folder.resolve()  # workers on other nodes have other working directories
    sample = config.input.model_copy(
        update={
            "path": [str(folder / SAMPLE)],
            "format": None,
            "snapshot": None,
            "id": None,
            "since": None,
            "changed": "error",
        }
    )
    output = config.output.model_copy(
        update={
            "path": str(folder / ANSWERS),
            "format": None,
            "table": None,
            "keep": [],
            "token_ids": True,
            "cumulative_logprob": False,
        }
    )
    return config.model_copy(
        update={
            "input": sample,
            "output": output,
            "model": config.model.model_copy(update={"path": pinned_path(config, resolved)}),
            "schedule": JobScheduleConfig(speedup=1.0),
            "sampling": config.sampling.model_copy(update={"n": 1}),
            "adapt": None,
            "budget": None,  # of the job alone
        }
    )


def pinned_path(config: JobConfig, resolved: ResolvedCheckpoint) -> str:
    """The job's checkpoint as every node resolves it; on the hub at the commit that was resolved."""
    if isinstance(resolved.source, str) or resolved.source.commit is None:
        return config.model.path
    return f"{config.model.path.partition('@')[0]}@{resolved.source.commit}"


def schedule_shape(config: JobConfig, stored: ScheduleSpec | None) -> dict[str, Any]:
    """Keys of the job's schedule, on top of the checkpoint's, that tune keeps: all but the depths.

    Without an order of the job or the checkpoint it is measured, and the warm-up follows unless the job sets it. Raises
    UserError for a key that tune lacks.
    """
    changes = {key: value for key, value in config.schedule.changes().items() if key in KEPT}
    start = stored or ScheduleSpec(keep_order=MEASURED)
    spec = start.overridden(changes)
    for key, decay in NOT_TRAINED_FOR.items():
        if spec.decay == decay and getattr(spec, key) != getattr(start, key):
            raise UserError(f"schedule.{key}: adapt trains for {getattr(start, key)} alone; leave it out")
    left_out = {*NOT_TRAINED_FOR, *({"warmup"} - changes.keys() if spec.keep_order == MEASURED else ())}
    return {key: value for key, value in spec.to_dict().items() if key in KEPT and key not in left_out}


def tune_config(
    config: JobConfig,
    shape: Mapping[str, Any],
    model: str,
    max_tokens: int,
    folder: Path,
    source: str,
    prompts: Sequence[str],
) -> TuneConfig:
    """Tune's recipe. Raises UserError for wrong options.

    model: local folder. max_tokens: of the longest pair. prompts: prompt policies; all are drawn equally often.
    """
    adapt = options(config)
    own, *further = prompts
    also = [{"speedup": speedup, "prompt": prompt} for prompt in further for speedup in adapt.speedups if speedup > 1]
    columns = {"prompt": "prompt", "train_reference": "response", "dev_reference": "response", "ended": "ended"}
    values: dict[str, Any] = {
        "model": {"path": model},
        "data": {
            "train": str(folder / TRAIN),
            "dev": str(folder / HELD_OUT),
            "max_tokens": max(4, adapt.max_tokens or max_tokens),
            **columns,
        },
        "output": str(folder / trained(config)),
        "schedule": {"speedups": list(adapt.speedups), **shape, "prompt": own, "also": also},
        "loss": {**LOSS, **adapt.loss},
        "adapter": adapt.adapter if trains_adapter(config) else None,
        "training": {
            **TRAINING,
            "learning_rate": LEARNING_RATE[adapt.weights],
            "speeds_per_step": len(adapt.speedups),
            "bf16": config.model.dtype != "float32",
            **adapt.training,
        },
        "workers": adapt.workers or None,
    }
    return validated(TuneConfig, values, "adapt")


def eval_values(
    config: JobConfig,
    shape: Mapping[str, Any],
    model: Mapping[str, str],
    reference: str | None,
    output: Path,
    folder: Path,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Evaluate's recipe, over the held-out rows, greedy: sampled answers would differ without any loss of quality.

    model: keys of the model section that differ from the job's. reference: checkpoint whose full depth losses are
    against; None: the model's own. Rows' own sampling is ignored.
    Keys for runs, threads, cache and rows in flight are not included.
    """
    adapt = options(config)
    greedy = {"temperature": 0.0, "n": 1, "logprobs": None}
    return {
        "data": {
            "path": str(folder / HELD_OUT),
            "prompt": "prompt",
            "references": None if adapt.references is None else "references",
        },
        "model": {**config.model.model_dump(), **model},
        "reference_model": reference,
        "output": str(output),
        "schedule": {key: list(value) if isinstance(value, tuple) else value for key, value in shape.items()},
        "speedups": sorted({1.0, *adapt.speedups}),
        "prompts": list(prompts),
        "sampling": {**config.sampling.model_dump(), **greedy},
        "choices": None if config.choices is None else list(config.choices),
        "storage": config.storage.model_dump(),
    }


def tuned_model(config: JobConfig, resolved: ResolvedCheckpoint, folder: Path) -> dict[str, str]:
    """The model section of the job file: the trained checkpoint, or the resolved base and its speed adapter.

    The path is relative only where the user's own is a relative folder.
    """
    path = folder / trained(config)
    relative = isinstance(resolved.source, str) and not Path(config.model.path).is_absolute()
    own = str(path if relative else path.resolve())
    return {"path": pinned_path(config, resolved), "speed_adapter": own} if trains_adapter(config) else {"path": own}


def job_text(
    values: Mapping[str, Any], model: Mapping[str, str], schedule: Mapping[str, Any], comment: Sequence[str]
) -> str:
    """The user's job file with these keys of its model section and the chosen schedule, without its `adapt` section."""
    checks = values.get("schedule") or {}
    job = {
        **{key: value for key, value in values.items() if key != "adapt"},
        "model": {**values["model"], **model},
        "schedule": {key: value for key, value in checks.items() if key in CHECKS} | dict(schedule),
    }
    head = "".join(f"# {flat(line)}\n" for line in comment)
    return head + dump_yaml(job)
