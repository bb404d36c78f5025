"""A whole run but for Ray and the model: plan, lease, commits and finalization are real, the parts are made up."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from part_builders import part, part_stats

from pipeline import job as jobs
from pipeline.commit.sink import commit
from pipeline.config.job import JobConfig
from pipeline.plan.manifest import Manifest
from pipeline.read.shards import Shard
from pipeline.storage.folder import Folder


def run(values: dict[str, Any]) -> None:
    """Run a job, given as JobConfig's values, in a process that does nothing else afterwards."""
    jobs.ray_session = jobs.early_ray = lambda *given: nullcontext()  # type: ignore[assignment]
    jobs._flow = _flow  # type: ignore[assignment]
    jobs.run(JobConfig.model_validate(values))


def _flow(
    config: JobConfig, located: Any, schedule: Any, manifest: Manifest, folder: Folder, left: list[Shard]
) -> None:
    for shard in left:
        data = part(shard, fingerprint=manifest.fingerprint)
        commit(folder, shard, data, part_stats(shard), manifest.fingerprint)
