"""Plans a job: checks job file, checkpoint, schedule and input, and builds the arguments of the stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from pipeline.checkpoints.resolve import ResolvedCheckpoint, resolve_checkpoint
from pipeline.commit.duplicates import count_repeated, repeated_error
from pipeline.config.job import JobConfig
from pipeline.generate.output import PartSpec
from pipeline.generate.settings import generator_settings
from pipeline.input.files import Files
from pipeline.input.rows import read_shards
from pipeline.input.schema import ERROR
from pipeline.input.shards import Shard
from pipeline.messages import counted
from pipeline.plan import manifest as manifests
from pipeline.plan.batching import with_engine
from pipeline.plan.columns import kept_columns, optional_columns
from pipeline.plan.hardware import Hardware
from pipeline.plan.manifest import Manifest
from pipeline.prepare.prompt_spec import check_generation, check_spec, marks_of_thinking, prompt_spec
from pipeline.runtime.announce import announced


@dataclass(frozen=True)
class PlannedJob:
    """A job that has been planned and is ready to run."""

    config: JobConfig
    checkpoint: ResolvedCheckpoint
    schedule: Schedule
    manifest: Manifest
    began: float = 0.0  # start of the run, s since 1970


def plan(
    config: JobConfig,
    stored: Manifest | None,
    hardware: Hardware,
    *,
    limit: int | None = None,
    files: Files | None = None,
    preview: bool = False,
) -> PlannedJob:
    """Plan a new job, or continue a job with the pinned values of its plan `stored`.

    preview: do not look for repeated ids. For the other arguments and errors see `plan_job`. Also raises UserError if
    checkpoint, prompt settings or input are wrong, or differ from those of the stored job.
    """
    began = time.time()
    config = with_engine(config, None if stored is None else stored.identity["model"].get("engine", "auto"))
    if stored is not None and files is None and (before := stored.identity["input"]["path"]) != config.input.path:
        raise UserError(
            f"{config.output.path}: this output belongs to the input {', '.join(before)}, not to "
            f"{', '.join(config.input.path)}; choose another output.path, or start again with --overwrite"
        )
    with announced("reading the checkpoint's description"):
        checkpoint = resolve_checkpoint(config.model, config.storage, stored.identity.get("model") if stored else None)
    unadapted = config.schedule.unadapted
    schedule = checkpoint.schedule(config.schedule.changes(), config.model, unadapted=unadapted)
    check_generation(config, checkpoint)
    check_spec(prompt_spec(config, checkpoint, time.time()))
    marks_of_thinking(config, checkpoint)  # raises UserError for wrong delimiters, before a model is loaded
    manifest = manifests.plan_job(
        config, checkpoint, schedule, limit, stored, files, hardware=hardware, preview=preview
    )
    actors = config.actors.model_copy(update={"threads": manifest.batching.threads})
    config = config.model_copy(update={"actors": actors})
    if stored is None and not preview:
        _check_ids(config, manifest)
    return PlannedJob(config, checkpoint, schedule, manifest, began)


def _check_ids(config: JobConfig, manifest: Manifest) -> None:
    """Raise UserError if ids repeat in a batch file, or in Parquet files if `input.duplicate_ids` is error."""
    column, is_batch = config.input.id_column, config.input.is_batch
    is_parquet = all(file.format == "parquet" for file in manifest.files)
    if column is None or not (is_batch or (is_parquet and config.input.duplicate_ids == "error")):
        return

    def read(shards: Sequence[Shard]) -> Iterator[pa.ChunkedArray]:
        schema = pa.schema([manifest.schema.field(column)])
        for shard, table in read_shards(manifest.files, shards, schema, config.storage):
            ids = table[column]
            if is_batch:  # rows without an id have an error already; unique ids keep them from counting as repeated
                rows = enumerate(zip(ids.to_pylist(), table[ERROR].to_pylist(), strict=True), shard.first_row)
                ids = pa.chunked_array(
                    [[f"\0{shard.url}\0{row}" if one is None or error else one for row, (one, error) in rows]]
                )
            yield ids

    with announced("looking for repeated ids"):
        found, examples = count_repeated(read(manifest.shards), manifest.shards, lambda shard: next(read([shard])))
    if found and is_batch:
        repeated = counted(found, "row")
        raise UserError(f"custom_id repeats in {repeated}, such as {'; '.join(examples)}; make it unique")
    if found:
        raise repeated_error(found, examples)


def generator_arguments(job: PlannedJob) -> dict[str, Any]:
    """Return the arguments of `Generator`, in which checkpoint and speed adapter are sources for `fetch`."""
    batching = job.manifest.batching
    return {
        **generator_settings(job.config.model, job.config.sampling, job.config.choices, job.config.output_format),
        "checkpoint": job.checkpoint.pinned(),
        "speed_adapter": None if job.schedule.is_full_depth else job.checkpoint.pinned_adapter(),
        "schedule": job.schedule,
        "strip": job.config.output.strip,
        "reasoning": marks_of_thinking(job.config, job.checkpoint),
        "row_logprobs": job.config.input.is_batch,
        "share_prefixes": job.config.shared_prefix,
        "cumulative_logprob": job.config.output.cumulative_logprob,
        "threads": batching.threads,
        "cache_bytes": batching.cache_bytes,
        "max_batch": batching.max_batch,
        "scheduler": batching.scheduler,
    }


def part_spec(job: PlannedJob) -> PartSpec:
    """Return the `PartSpec` of the job's parts (output files of shards)."""
    return PartSpec(
        id_column=job.config.input.id_column,
        keep=tuple(kept_columns(job.config)),
        optional=optional_columns(job.config),
        fingerprint=job.manifest.fingerprint,
        num_layers=job.checkpoint.checkpoint.num_layers,
        root=job.manifest.batching.root,
    )
