"""Makes the job that answers the sample at full depth, and the job file that runs at the chosen speed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engine.errors import flat
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.job import JobConfig, RunScheduleConfig
from pipeline.config.load import dump_yaml
from pipeline.learn.adapt.task import ANSWERS, SAMPLE, Task
from pipeline.learn.score.lines import Line


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


def tuned_model(task: Task) -> dict[str, str]:
    """Return `model` keys for the final job file: the trained checkpoint, or the job's checkpoint and a new adapter.

    The path of the trained files is relative if `model.path` in the user's job file is a relative local path.
    """
    relative = isinstance(task.resolved.source, str) and not Path(task.config.model.path).is_absolute()
    own = str(task.trained if relative else task.trained.resolve())
    if task.adapter is None:
        return {"path": own}
    return {"path": pinned_path(task.config, task.resolved), "speed_adapter": own}


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
    schedule: dict[str, Any] = {"speedup": chosen.nominal}
    schedule |= {} if chosen.prompt == "full" else {"prompt": chosen.prompt}
    schedule |= {"decay": "constant"} if chosen.uniform else {}
    job = {**values, "model": {**values["model"], **tuned_model(task)}, "schedule": schedule}
    job.pop("adapt", None)
    return "".join(f"# {flat(line)}\n" for line in comment) + dump_yaml(job)
