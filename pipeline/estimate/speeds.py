"""Speeds that a job's checkpoint was trained for, and their recorded loss of quality."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.schedules.schedule import Schedule
from pipeline.config.adapt import TOLERANCES
from pipeline.config.job import JobConfig
from pipeline.estimate.measure import EXACT, LOOKUP
from pipeline.job import PlannedJob

OFFERED = (1.5, 2.0, 3.0, 4.0, 5.0)  # where no tune.json lists the speeds of the training
DEPTH_KEYS = ("speedup", "max_depth", "min_depth", "depths")
METRICS = tuple(dict.fromkeys(("bleu", "rouge_l", "exact_match", *TOLERANCES)))  # the first that a record has


def name_of(schedule: Schedule) -> str:
    """Speed of a schedule as shown to users, such as `2x`."""
    if schedule.is_full_depth:
        return "1x"
    return f"{schedule.speedup:g}x" if schedule.speedup is not None else "the job's schedule"


def schedules(job: PlannedJob) -> dict[str, Schedule]:
    """Schedules by name: the job's own first, then other speeds that the checkpoint was trained for, then 1x."""
    checkpoint = job.checkpoint.checkpoint
    kept = {key: value for key, value in job.config.schedule.changes().items() if key not in DEPTH_KEYS}
    found = {name_of(job.schedule): job.schedule}
    folder = _trained_folder(job.config)
    for speed in sorted(_trained_speeds(folder) if folder else OFFERED):
        try:
            schedule = checkpoint.schedule({**kept, "speedup": speed})
        except UserError:  # such as a horizon that nothing gives
            continue
        if checkpoint.trained is not None and checkpoint.trained.covers(schedule):
            found.setdefault(name_of(schedule), schedule)
    full = checkpoint.schedule({"speedup": 1.0})
    found.pop("1x", None)
    return {**found, "1x": job.schedule if job.schedule.is_full_depth else full}


def chosen_name(job: PlannedJob) -> str:
    """Name of the job's own speed."""
    return EXACT if job.drafts is not None else name_of(job.schedule)


def exact_lines(job: PlannedJob) -> dict[str, Schedule]:
    """Exact mode by name: the job's own, or prompt lookup alone, which needs nothing, where a CPU may have it.

    It is predicted as full depth with the same batches, times what the sample took over a simulation of that.
    """
    full = job.checkpoint.checkpoint.schedule({"speedup": 1.0})
    if job.drafts is not None:
        return {EXACT: full}
    model = job.config.model
    on_gpu = job.config.actors.gpus > 0 or model.device.startswith("cuda")
    return {} if on_gpu or model.compile or model.dtype != "bfloat16" else {LOOKUP: full}


def _trained_folder(config: JobConfig) -> Path | None:
    """The local folder of the speed adapter, else of the checkpoint."""
    folder = Path(config.model.speed_adapter or config.model.path)
    return folder if folder.is_dir() else None


def _trained_speeds(folder: Path) -> list[float]:
    try:
        values = _object(folder / "tune.json")["config"]["schedule"]["speedups"]
        return [float(value) for value in values if value > 1] or list(OFFERED)
    except (LookupError, TypeError, ValueError):
        return list(OFFERED)


@dataclass(frozen=True)
class Loss:
    """Loss of a speed against full depth, in the metric's unit; a gain is negative. low: None if not recorded."""

    metric: str
    loss: float
    low: float | None
    high: float
    source: str

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:.2g}, "
        return f"loses {self.loss:.2g} [{low}{self.high:.2g}] {self.metric.replace('_', ' ')}"


def losses(config: JobConfig, prompt: str) -> dict[str, Loss]:
    """Recorded loss of each speed; {} without a record of evaluate or adapt in the folder of checkpoint or adapter.

    Args:
        config: The job's config.
        prompt: The job's prompt policy.
    """
    folder = _trained_folder(config)
    if folder is None:
        return {}
    for place in (folder, folder / "evaluate", folder.parent):
        found = _of_table(place / "table.json", prompt) or _of_adapt(place / "adapt.json", prompt)
        if found:
            return found
    return {}


def _of_table(path: Path, prompt: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {}
    for line in _object(path, list):
        if not isinstance(line, dict) or line.get("nominal") is None or line.get("prompt") != prompt:
            continue
        metric = next((name for name in METRICS if line.get(f"{name}_loss") is not None), None)
        if metric is not None and line.get("group") in ("speed", "prompt"):
            values = (line[f"{metric}_loss"], line[f"{metric}_loss_low"], line[f"{metric}_loss_high"])
            found.setdefault(f"{line['nominal']:g}x", Loss(metric, *values, str(path)))
    return found


def _of_adapt(path: Path, prompt: str) -> dict[str, Loss]:
    try:
        lines: list[Mapping[str, Any]] = _object(path)["done"]["after"]["result"]["lines"]
        found = {}
        for line in lines:
            metric = next((name for name in METRICS if name in line["scores"]), None)
            if metric is not None and line["nominal"] is not None and line["prompt"] == prompt:
                score = line["scores"][metric]
                name = f"{line['nominal']:g}x"
                found[name] = Loss(metric, score["loss"], None, score["loss_high"], str(path))
        return found
    except (LookupError, TypeError, ValueError):
        return {}


def _object(path: Path, kind: type = dict) -> Any:
    """The value of a JSON file; empty if there is none, or it is of another kind."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return kind()
    return value if isinstance(value, kind) else kind()
