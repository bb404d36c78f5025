"""`skipdecode adapt`: makes a job's checkpoint faster by training it on rows of the job.

    input ──> sample ──> answers at full depth ──> train ──> score before and after ──> job file
              k rows     by the job's pipeline     on all    on the held-out rows      fastest within tolerance
                                                   but the held-out

All stages write into one folder. If the command is repeated, it skips the stages that are done.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.answers import Prompt
from actors.engine.cpu.executor import fastest_decoder
from actors.engine.errors import UserError, free_memory
from actors.engine.machine import set_threads
from actors.engine.model.file_digests import digests
from actors.engine.model.loading import inspect, load_decoder
from actors.engine.schedule.file import load_spec
from actors.engine.schedule.schedule import MEASURED, ScheduleSpec
from pipeline import job as jobs
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch
from pipeline.commit.lease import leased
from pipeline.config.adapt import TOLERANCES
from pipeline.config.job import JobConfig
from pipeline.learn.adapt.choice import (
    BreakEven,
    RowCost,
    announcement,
    choose,
    full_depth,
    nearest,
    working_actors,
)
from pipeline.learn.adapt.job_file import full_depth_job, job_text
from pipeline.learn.adapt.pairs import metric_of, read_pairs, training_pairs, write_pairs
from pipeline.learn.adapt.plan import plan_adaptation, stage_settings
from pipeline.learn.adapt.record import STAGES, StageRecord
from pipeline.learn.adapt.task import AFTER, ASKED, BEFORE, DEV, HELD_OUT, JOB_FILE, SAMPLE, TRAIN, Task
from pipeline.learn.keep_order import measured_order
from pipeline.learn.rows import draw, read_sample
from pipeline.learn.score.lines import Line, Scores, scores_of
from pipeline.learn.train.recipe import context_of
from pipeline.plan.batching import with_engine
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.runtime.announce import announce
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import LocalFolder
from pipeline.storage.local_output import replacing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapted:
    """Result of an adaptation.

    trained: name of the subfolder of `folder` with the adapter or the checkpoint. before, after: table lines of the
    job's and of the tuned checkpoint. chance: scores of answers that do not depend on their row. harmed: a warning for
    each speed that the training made worse. chosen, break_even, job_file: None if no speed-up is within the tolerance.
    nearest: see `choice.nearest`. engine: what the lines in `after` were timed on. counts: kind of rows -> number.
    seconds: stage -> seconds.
    """

    folder: Path
    trained: str
    metric: str
    tolerance: float
    before: list[Line]
    after: list[Line]
    chance: Scores
    harmed: list[str]
    chosen: Line | None
    nearest: Line
    engine: str
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    break_even: BreakEven | None
    job_file: Path | None


def adapt(config: JobConfig, values: Mapping[str, Any], source: str, *, verbose: bool = False) -> Adapted:
    """Adapt the job's checkpoint to the job's rows and choose a speed, stage by stage.

    values, source: content and name of the user's job file; the new job file is a changed copy. verbose: see
    `job.run`. Raises UserError for a mistake, if possible before Ray starts, and the errors of `job.run`.
    """
    task, stored = plan_adaptation(config, source)
    settings = stage_settings(task)
    stored.check(settings)
    stored.begin()
    with interruptible(), leased(LocalFolder(str(task.folder), task.folder)):
        record = StageRecord(task.folder)  # read again: another run may have changed it before this one got the lease
        record.check(settings)
        return _adapt(task, values, record, verbose)


def _adapt(task: Task, values: Mapping[str, Any], record: StageRecord, verbose: bool) -> Adapted:
    config, folder, options, run = task.config, task.folder, task.options, record.run
    sampled = run("sample", f"draw {options.rows:,} of {task.rows:,} rows", [SAMPLE], lambda: _sample(task))
    if sampled["inputs"] != task.inputs:
        log.warning("%s: changed since the sample was drawn; new rows are not sampled", ", ".join(config.input.path))
    pairs = [TRAIN, HELD_OUT]
    asked = sampled["drawn"] - sampled["unreadable"] if options.responses is None else sampled["held_out"]
    purpose = f"answer {asked:,} rows at full depth with {config.model.path}"
    answered = run("answers", purpose, pairs, lambda: _answer(task, sampled["held_out"], verbose))
    if "row" in answered and not record.done.keys() >= set(STAGES):
        announce(announcement(task, RowCost(**answered["row"]), record.done))
    counts = answered["counts"]
    given = {"choices": config.choices is not None, "references": options.references is not None}
    metric = metric_of(read_pairs(folder, HELD_OUT), options.metric, **given)
    purpose, share = f"train {config.model.path} on {counts['train']:,} answers", answered["prompt_share"]
    tuned = run("tune", purpose, [f"{task.trained.name}/tune.json"], lambda: _tune(task, share))
    names = ("threads", "cache_bytes")
    actors = {name: getattr(config.actors, name) or answered["actors"][name] for name in names}
    purpose = f"measure the {{}} checkpoint on {counts['held_out']:,} held-out rows"
    scored = replace(task, config=config.model_copy(update={"actors": config.actors.model_copy(update=actors)}))
    before = run("before", purpose.format("job's"), [], lambda: _score(scored, share, tuned=False))
    after = run("after", purpose.format("tuned"), [], lambda: _score(scored, share, tuned=True))
    lines, chance = [Line.of(line) for line in after["lines"]], scores_of(after.get("chance", {}))
    tolerance = options.tolerance or TOLERANCES[metric]
    chosen = choose(metric, tolerance, lines, chance)
    seconds = {stage: record.seconds[stage] for stage in STAGES}
    break_even, job_file = None, folder / JOB_FILE

    def row_seconds(line: Line) -> float:  # the evaluation gave one answer to each row; the job gives n
        return line.seconds + (config.sampling.n - 1) * line.decode_seconds / float(counts["held_out"])

    if chosen is not None:
        break_even = BreakEven(
            cost=sum(seconds[stage] for stage in STAGES if stage != "before"),  # "before" only fills the table
            full=row_seconds(full_depth(lines)),
            fast=row_seconds(chosen),
            rows=task.rows,
            actors=working_actors(config, actors["threads"]),
        )
    text = "" if chosen is None else job_text(task, values, chosen, metric, tolerance, job_file)
    record.write_job(job_file, text)
    return Adapted(
        folder=folder,
        trained=task.trained.name,
        metric=metric,
        tolerance=tolerance,
        before=[Line.of(line) for line in before["lines"]],
        after=lines,
        chance=chance,
        harmed=tuned.get("harmed", []),
        chosen=chosen,
        nearest=nearest(metric, lines, chance),
        engine=after["engine"],
        counts={"job": task.rows, "drawn": sampled["drawn"], "unreadable": sampled["unreadable"], **counts},
        seconds=seconds,
        break_even=break_even,
        job_file=None if chosen is None else job_file,
    )


def _sample(task: Task) -> dict[str, Any]:
    drawn = draw(task.rows, task.options.rows)
    table, readable = read_sample(task.config, task.files, task.schema, drawn)
    with replacing(task.folder / SAMPLE) as temporary:
        pq.write_table(table, temporary)
    return {
        "inputs": task.inputs,
        "drawn": len(drawn),
        "unreadable": readable.count(False),
        "held_out": readable[: task.options.held_out].count(True),
    }


def _answer(task: Task, held_out: int, verbose: bool) -> dict[str, Any]:
    """Answer the sample in a separate job at full depth, and write the pairs to train on and the rows to score."""
    asked = SAMPLE
    if task.options.responses is not None:  # answer only the held-out rows: `responses` answers the others
        asked = ASKED
        with replacing(task.folder / asked) as temporary:
            pq.write_table(pq.read_table(task.folder / SAMPLE).slice(0, held_out), temporary)
    job = full_depth_job(task.config, task.resolved, task.folder, asked)
    result = jobs.run(job, verbose=verbose)
    batching, totals = result.manifest.batching, result.totals
    for line in totals.warnings:  # signs of bad answers, which the model would learn
        log.warning("in the sample, at full depth, %s", line)
    spec = prompt_spec(job, task.resolved, batching.planned)
    counts = write_pairs(task.folder, spec, held_out, task.options, task.config.choices)
    seconds = totals.prefill_seconds + totals.decode_seconds
    sums = {
        "prompt": totals.prompt_tokens,
        "answer": totals.generated_tokens,
        "prefill_seconds": totals.prefill_seconds,
        "decode_seconds": totals.decode_seconds,
    }
    return {
        "counts": counts,
        "actors": {"threads": batching.threads, "cache_bytes": batching.cache_bytes},
        "prompt_share": totals.prefill_seconds / seconds if seconds else 0.0,
        "row": {name: total / (totals.stopped + totals.cut_off) for name, total in sums.items()},
    }


def _tune(task: Task, prompt_share: float) -> dict[str, Any]:
    """Train at every speed, with every prompt policy to try. Return the warnings about speeds that were harmed."""
    from pipeline.learn.train.run import train  # imported late: the training starts only after Ray has been shut down

    start, options = fetch(task.resolved.source), task.options
    files = [read_pairs(task.folder, TRAIN), read_pairs(task.folder, DEV) or read_pairs(task.folder, HELD_OUT)]
    context = context_of(task.resolved.checkpoint, task.adapter, options.loss.teacher)
    most, end = min(context, options.max_tokens or context), tokenizer_of(str(start)).eos_token_id
    pairs, dev = (training_pairs(rows, end, most) for rows in files)
    if not pairs or len(dev) < 2:
        raise UserError(f"adapt.max_tokens: {len(pairs)} pairs to train on and {len(dev)} of the dev set are left")
    horizon = task.spec.horizon or max(2, int(statistics.median(len(row["response"]) for row in files[0])))
    spec = task.spec.overridden({"horizon": horizon, "speedup": options.speedups[-1]})
    if spec.keep_order == MEASURED:
        spec = _with_measured_order(task, start, spec, files[0])
    variants = task.variants(spec, prompt_share)
    stored = replace(spec, prompt=variants[0].spec.prompt)
    record = train(start, task.recipe(stored, task.schedules(variants)), pairs, dev, task.trained)
    return {"harmed": record["harmed"]}


def _with_measured_order(
    task: Task, start: Path, spec: ScheduleSpec, rows: Sequence[Mapping[str, Any]]
) -> ScheduleSpec:
    """Return `spec` with the layer order of the checkpoint `start`, and its warm-up unless the job sets one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_bf16 = device.type == "cuda" and task.config.model.dtype != "float32"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    set_threads(task.options.training.threads)
    order, warmup = measured_order(
        {"files": digests(start), "dtype": str(dtype).removeprefix("torch.")},
        lambda: fastest_decoder(load_decoder(start, dtype, device).model),
        [(row["prompt"], row["response"]) for row in rows],
        task.config.schedule.warmup,
        None,
    )
    free_memory()  # the training needs the GPU's memory
    return replace(spec, keep_order=order, warmup=warmup)


def _score(task: Task, prompt_share: float, *, tuned: bool) -> dict[str, Any]:
    """Score a checkpoint at every speed on the held-out rows. Return the lines, chance, and the engine that was timed.

    tuned: whether to score the trained checkpoint; if not, the job's checkpoint is scored, timed only once, because the
    choice of a speed does not use these times.
    """
    from pipeline.learn.score.run import REFERENCE, score
    from pipeline.learn.score.timing import timed_in_vllm

    resolved, options, rows = task.resolved, task.options, read_pairs(task.folder, HELD_OUT)
    spec = load_spec(task.trained, resolved.checkpoint.num_layers)
    assert spec is not None, "training writes one"
    model, others = resolved, dict[str, Path]()
    if tuned and task.adapter is None:  # with a speed adapter, 1x already is the job's own checkpoint
        model, others = (
            ResolvedCheckpoint(inspect(task.trained), str(task.trained)),
            {REFERENCE: fetch(resolved.source)},
        )
    elif tuned:
        model = replace(resolved, adapter=str(task.trained))
    variants = task.variants(spec, prompt_share)
    prompts = [Prompt(row["prompt"], str(task.folder / HELD_OUT), number) for number, row in enumerate(rows)]
    references = None if options.references is None else [row["references"] for row in rows]
    runs = options.runs if tuned else 1
    found = score(task.config, model, variants, prompts, references, others=others, runs=runs)
    lines, job = found.lines, with_engine(task.config, None) if tuned else task.config
    on_vllm = tuned and job.model.engine == "vllm"  # which cannot be scored, as it gives no logits for fewer layers
    if on_vllm:
        free_memory()
        lines = timed_in_vllm(job, model, variants, prompts, lines, runs)
    columns = {name: [answer.generated_text for answer in answers] for name, answers in found.answers.items()}
    tokenizer = tokenizer_of(str(fetch(resolved.source)))
    texts = {"prompt": [tokenizer.decode(row["prompt"]) for row in rows]}
    texts |= {} if references is None else {"references": references}
    with replacing(task.folder / (AFTER if tuned else BEFORE)) as temporary:
        pq.write_table(pa.table({**texts, **columns}), temporary)
    return {
        "lines": [asdict(replace(line, seconds=line.seconds / found.rows)) for line in lines],
        "chance": {name: asdict(score) for name, score in found.chance.items()},
        "engine": "vllm" if on_vllm else "builtin",
    }
