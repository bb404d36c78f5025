"""Measures how often a new job's schedule agrees with full depth. Refuses the job if the agreement is too low.

Jobs at full depth are not measured. The agreement is stored in the plan and in this machine's cache. Later jobs with
the same checkpoint, schedule and prompts read it from the cache, for example the next run over a growing table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.model.file_digests import cache_record, write_record
from actors.engine.schedule.schedule import Schedule
from pipeline.config.job import JobConfig
from pipeline.generate.agreement import Agreement, measure_agreement
from pipeline.input.shards import spread_rows
from pipeline.plan.hardware import Hardware
from pipeline.plan.manifest import Manifest
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.tokenizer import tokenize_labels, tokenizer_of
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.isolated import Died

log = logging.getLogger(__name__)
# a hint is printed if the schedule skips less than this share of all layer runs, but at least this share in answers
LITTLE = 0.1


def can_gain(schedule: Schedule, spec: PromptSpec) -> bool:
    """Return whether any token of the job can run fewer layers than at full depth.

    No token can if prompts run all layers and answers have one token: prefill computes an answer's first token.
    """
    if len(schedule.prompt_layers) < schedule.num_layers:
        return True
    if schedule.is_full_depth:
        return False
    if spec.input.choices is not None or spec.input.sampling or spec.input.is_batch:
        return True  # rows may set the lengths of their answers
    if not spec.choices:
        return spec.sampling.max_new_tokens > 1
    tokenizer = tokenizer_of(spec.checkpoint)
    ids = tokenize_labels(tokenizer, spec.choices)
    return ChoiceTrie([ids[label] for label in spec.choices], [tokenizer.eos_token_id]).most_tokens > 1


def announce_no_gain(schedule: Schedule, spec: PromptSpec) -> None:
    """Print a line if the schedule skips layers, but no token of this job can skip any."""
    if not schedule.is_full_depth and not can_gain(schedule, spec):
        announce(
            "this schedule cannot make the job faster: every answer has one token, which prefill computes with all "
            "layers (schedule.prompt is full). To train a model that skips layers in prefill, set adapt.prompt: first"
        )


def is_measured(config: JobConfig, schedule: Schedule, spec: PromptSpec) -> bool:
    """Return whether to measure the agreement of a new job with full depth.

    The library engine does the measurement. It cannot run a model that vLLM splits over GPUs or quantizes.
    """
    if {"tensor_parallel_size", "quantization"} & {*(config.model.vllm or {})}:
        return False
    return not schedule.is_full_depth and config.schedule.agreement_rows > 0 and can_gain(schedule, spec)


def with_agreement(
    config: JobConfig,
    schedule: Schedule,
    manifest: Manifest,
    spec: PromptSpec,
    generator: Mapping[str, Any],
    hardware: Hardware,
) -> Manifest:
    """Measure and print a new job's agreement with full depth; return the plan with `agreement` set.

    The measurement runs in a process with an actor's resources. If that process dies, a warning is logged; the row that
    killed it will be quarantined when the job runs. generator: arguments of `Generator`, as in `ShardGenerator`. Raises
    UserError if the agreement is below `schedule.min_agreement`.
    """
    on_vllm = generator["vllm"] is not None
    if on_vllm:  # the library engine does the measurement, with a KV cache of its own
        generator = {**generator, "vllm": None, "cache_bytes": generator["cache_bytes"] or 2**30}
    record = _record(config, manifest.identity)
    agreement: Agreement | None = None
    with suppress(OSError, ValueError):  # the record does not exist, or is damaged
        agreement = TypeAdapter(Agreement).validate_json(record.read_bytes())
    origin = ", measured in an earlier run" if config.input.since is None else ", measured on rows of an earlier run"
    if agreement is None:
        rows = spread_rows(manifest.files, manifest.shards, config.schedule.agreement_rows)
        urls = {row.url for row in rows}
        files = [file for file in manifest.files if file.url in urls]
        inputs = (rows, files, manifest.schema, config.storage, spec, generator)
        try:
            with announced(f"measuring agreement with full depth on {len(rows)} rows"):
                [agreement] = hardware.call_as_actors(config.actors, measure_agreement, [inputs])
        except Died as error:
            log.warning("agreement with full depth is not measured: the process died (%s); the job continues", error)
            return manifest
        if on_vllm:
            # the measured times are those of the library engine, not of vLLM
            agreement = replace(agreement, prefill_ratio=None, decode_ratio=None)
        write_record(record, asdict(agreement))
        origin = ""
    least = config.schedule.min_agreement
    if agreement.share is not None and agreement.share < least:
        raise UserError(
            f"schedule: too little agreement with full depth: {agreement}{origin}, below "
            f"schedule.min_agreement = {least:g}; run `skipdecode adapt JOB`, or choose a lower speedup"
        )
    announce(f"agreement: {agreement}{origin}")
    depth = schedule.mean_depth(round(agreement.answer_tokens)) or schedule.num_layers
    if agreement.skipped is not None and agreement.skipped < LITTLE <= 1 - depth / schedule.num_layers:
        announce(
            f"this schedule can gain little: with prompts of {agreement.prompt_tokens:,.0f} tokens and answers of "
            f"{agreement.answer_tokens:,.0f} tokens, it skips only {agreement.skipped:.1%} of the layer runs"
        )
    return replace(manifest, agreement=agreement)


def _record(config: JobConfig, identity: Mapping[str, Any]) -> Path:
    """Return a measurement's file in this machine's cache. The file name depends on all inputs of the measurement.

    All runs over a growing table share one measurement, although each run reads different files.
    """
    inputs = dict(identity["input"])
    if config.input.since is not None:
        del inputs["files"]
    names = ("model", "schedule", "sampling", "choices", "output_format", "reasoning", "answers_version")
    kept = {key: identity[key] for key in names}
    values = {**kept, "input": inputs, "rows": config.schedule.agreement_rows}
    return cache_record(config.model.cache, "agreement", values)
