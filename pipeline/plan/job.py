"""Plans a job: checks job file, checkpoint, schedule and input, and makes the settings of the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pyarrow as pa

from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from actors.settings import EngineSettings
from pipeline.answer.output import PartSpec
from pipeline.checkpoints.resolve import ResolvedCheckpoint, resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.input.files import Files
from pipeline.input.rows import read_shards
from pipeline.input.schema import ERROR
from pipeline.plan import manifest as manifests
from pipeline.plan.batching import Batching, with_engine
from pipeline.plan.columns import kept_columns, optional_columns
from pipeline.plan.hardware import Hardware
from pipeline.plan.manifest import Manifest
from pipeline.prepare.prompt_spec import check_generation, check_spec, marks_of_thinking, prompt_spec
from pipeline.prepare.tokenizer import tokenize_labels, tokenizer_of
from pipeline.runtime.announce import announce, announced


@dataclass(frozen=True)
class PlannedJob:
    """A job that has been planned and is ready to run."""

    config: JobConfig
    checkpoint: ResolvedCheckpoint
    schedule: Schedule
    manifest: Manifest
    settings: EngineSettings
    began: float = 0.0  # start of the run, s since 1970


def plan(
    config: JobConfig,
    stored: Manifest | None,
    hardware: Hardware,
    *,
    limit: int | None = None,
    files: Files | None = None,
    root: str | None = None,
    preview: bool = False,
) -> PlannedJob:
    """Plan a new job, or continue a job with the pinned values of its plan `stored`.

    preview: do not look for a custom_id that occurs twice. For the other arguments and errors see `plan_job`. Also
    raises UserError if checkpoint, prompt settings or input are wrong, or differ from those of the stored job.
    """
    began = time.time()
    config = with_engine(config, None if stored is None else stored.identity["model"]["engine"])
    if stored is not None and files is None and (before := stored.identity["input"]["path"]) != config.input.path:
        raise UserError(
            f"{config.output.path}: this output belongs to the input {', '.join(before)}, not to "
            f"{', '.join(config.input.path)}; choose another output.path, or start again with --overwrite"
        )
    with announced("reading the checkpoint's description"):
        checkpoint = resolve_checkpoint(config.model, config.storage, stored.identity["model"] if stored else None)
    unadapted = config.schedule.unadapted
    schedule = checkpoint.schedule(config.schedule.changes(), config.model, unadapted=unadapted)
    check_generation(config, checkpoint)
    check_spec(prompt_spec(config, checkpoint, time.time()))
    manifest = manifests.plan_job(
        config, checkpoint, schedule, limit, stored, files, root=root, hardware=hardware, preview=preview
    )
    actors = config.actors.model_copy(update={"threads": manifest.batching.threads})
    config = config.model_copy(update={"actors": actors})
    if config.input.is_batch and stored is None and not preview:
        with announced("looking for a custom_id that occurs twice"):
            _check_custom_ids(config, manifest)
    settings = engine_settings(config, checkpoint, schedule, manifest.batching)
    return PlannedJob(config, checkpoint, schedule, manifest, settings, began)


def _check_custom_ids(config: JobConfig, manifest: Manifest) -> None:
    """Raise UserError if two requests of the batch files have one custom_id: their results could not be told apart."""
    schema, seen = pa.schema([manifest.schema.field("custom_id")]), dict[str, tuple[str, int]]()
    for shard, table in read_shards(manifest.files, manifest.shards, schema, config.storage):
        ids = zip(table["custom_id"].to_pylist(), table[ERROR].to_pylist(), strict=True)
        for row, (one, error) in enumerate(ids, shard.first_row):
            if one is None or error:  # the row has an error already
                continue
            url, first = seen.setdefault(one, (shard.url, row))
            if (url, first) != (shard.url, row):
                where = f"row {first} of {url} and row {row} of {shard.url}"
                raise UserError(f"custom_id {one[:80]!r} occurs twice: {where}; make it unique")


def can_gain(job: PlannedJob) -> bool:
    """Return whether any token of the job can run fewer layers than at full depth.

    No token can if prompts run all layers and answers have one token: prefill computes an answer's first token.
    """
    config, schedule = job.config, job.schedule
    if len(schedule.prompt_layers) < schedule.num_layers:
        return True
    if schedule.is_full_depth:
        return False
    if config.input.choices is not None or config.input.sampling or config.input.is_batch:
        return True  # rows may set the lengths of their answers
    if not config.choices:
        return config.sampling.max_new_tokens > 1
    tokenizer = tokenizer_of(job.checkpoint.pinned())
    ids = tokenize_labels(tokenizer, config.choices)
    return ChoiceTrie([ids[label] for label in config.choices], [tokenizer.eos_token_id]).most_tokens > 1


def announce_no_gain(job: PlannedJob) -> None:
    """Print a line if the schedule skips layers, but no token of this job can skip any."""
    if not job.schedule.is_full_depth and not can_gain(job):
        announce(
            "this schedule cannot make the job faster: every answer has one token, which prefill computes with all "
            "layers (schedule.prompt is full). To train a model that skips layers in prefill, set adapt.prompt: first"
        )


def engine_settings(
    config: JobConfig, checkpoint: ResolvedCheckpoint, schedule: Schedule, batching: Batching
) -> EngineSettings:
    """Return the settings of the job's engine, in which checkpoint and speed adapter are sources for `fetch`.

    Raises UserError if `reasoning` names wrong delimiters.
    """
    model = config.model
    return EngineSettings(
        checkpoint.pinned(),
        speed_adapter=None if schedule.is_full_depth else checkpoint.pinned_adapter(),
        schedule=schedule,
        sampling=config.sampling.model_dump(exclude={"seed"}),
        seed=config.sampling.seed,
        choices=config.choices,
        output_format=None if config.output_format is None else config.output_format.to_dict(),
        reasoning=marks_of_thinking(config, checkpoint),
        strip=config.output.strip,
        dtype=model.dtype,
        weights=model.weights,
        device=model.device,
        vllm=(model.vllm or {}) if model.engine == "vllm" else None,
        row_logprobs=config.input.is_batch,
        cumulative_logprob=config.output.cumulative_logprob,
        share_prefixes=config.shared_prefix,
        threads=batching.threads,
        cache_bytes=batching.cache_bytes,
        max_batch=batching.max_batch,
        scheduler=batching.scheduler,
    )


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
