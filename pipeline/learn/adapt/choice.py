"""Chooses the fastest speed within the tolerance. Estimates an adaptation's time and savings."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from actors.engine.machine import process_cpus
from actors.engine.model.loading import memory_needed
from actors.engine.model.weights import gib
from actors.engine.schedule.schedule import MEASURED
from pipeline.config.job import JobConfig
from pipeline.learn.adapt.task import Task
from pipeline.learn.keep_order import CANDIDATES
from pipeline.learn.keep_order import ROWS as ORDER_ROWS
from pipeline.learn.score.lines import Line, Scores, uselessness
from pipeline.learn.train.run import gpu_bytes
from pipeline.messages import counted, duration
from pipeline.run.ray_session import on_cluster

SPREAD = 2.0  # an estimated time is shown as an interval: from time ÷ SPREAD to time × SPREAD


def choose(metric: str, tolerance: float, lines: Sequence[Line], chance: Scores) -> Line | None:
    """Return the fastest line above 1x that is better than chance and has a `loss_high` of at most `tolerance`.

    If two lines are equally fast, return the one with fewer layers. If there is no such line, return None.
    """
    within = [
        line
        for line in _speedups(lines)
        if line.scores[metric].loss_high <= tolerance and uselessness(line, chance, metric) is None
    ]
    return min(within, key=lambda line: (line.seconds, -(line.layer_ratio or 1.0)), default=None)


def nearest(metric: str, lines: Sequence[Line], chance: Scores) -> Line:
    """Return the speed-up that needs the smallest tolerance; if any is better than chance, the best of these."""
    return min(
        _speedups(lines),
        key=lambda line: (uselessness(line, chance, metric) is not None, line.scores[metric].loss_high, line.seconds),
    )


def full_depth(lines: Sequence[Line]) -> Line:
    """Return the line at full depth: the reference model's line or, without a reference model, the lowest speed's."""
    return min(lines, key=lambda line: line.nominal or 0.0)


def _speedups(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.nominal is not None and line.nominal > 1]


def working_actors(config: JobConfig, threads: int | None = None) -> float:
    """Return how many of the job's actors can work at full speed at the same time, each on its own CPU cores or GPUs.

    A cluster has enough hardware for all actors. threads: number per actor; default: `actors.threads`.
    """
    actors, parallel = config.actors, float(config.actors.most)
    capacity = process_cpus() / (threads or actors.threads or 1)
    if actors.gpus:
        parallel *= min(actors.gpus, 1.0)  # actors on the same GPU take turns
        capacity = torch.cuda.device_count() / max(actors.gpus, 1.0)
    return max(1.0, parallel if on_cluster() else min(parallel, capacity))


@dataclass(frozen=True)
class BreakEven:
    """Cost and savings of an adaptation, in seconds.

    cost: wall clock of the adaptation. full: an actor's time for a row at full depth. fast: an actor's time for a row
    at the chosen speed, after adaptation. rows: rows of the job. actors: number of actors that work in parallel.
    """

    cost: float
    full: float
    fast: float
    rows: int
    actors: float = 1.0

    @property
    def at_rows(self) -> int | None:
        """Smallest number of rows for which the adaptation saves time; None if it never does."""
        saved = self.full - self.fast
        return math.ceil(self.cost * self.actors / saved) if saved > 0 else None

    @property
    def saved(self) -> float:
        """Net savings in seconds: time saved by the job, minus the adaptation's cost. Negative if it does not pay."""
        return self.rows * (self.full - self.fast) / self.actors - self.cost

    def sentences(self, speed: str) -> list[str]:
        """Return cost and savings as sentences. speed: name of the chosen speed."""
        job, without = f"this job has {counted(self.rows, 'row')}", self.rows * self.full / self.actors
        if self.at_rows is None:
            verdict = f"never: {speed} saves no time on this hardware, so adaptation does not pay"
        elif self.rows < self.at_rows:
            verdict = f"{self.at_rows:,} rows; {job}, so for this job alone adaptation does not pay"
        else:
            verdict = (
                f"{self.at_rows:,} rows; {job}: {duration(without)} become {duration(without - self.saved)} "
                f"with adaptation included ({100 * self.saved / without:.0f}% saved)"
            )
        return [
            f"adaptation took {duration(self.cost)}, not counting the evaluation before the training. One actor needs "
            f"{duration(self.full)} for a row at full depth, and {duration(self.fast)} at {speed} after adaptation",
            f"break-even: {verdict}",
            f"(assumed: {self.actors:.3g} actor{'s' * (self.actors != 1)} in parallel, each with its own "
            "hardware, which is as fast as this machine's)",
        ]


@dataclass(frozen=True)
class RowCost:
    """Mean cost of a row at full depth: tokens of prompt and answer, seconds of prefill and of decode steps."""

    prompt: float
    answer: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of prefill and decode steps together."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def prompt_share(self) -> float:
        """Share of the time that is spent on prompts."""
        return self.prefill_seconds / self.seconds if self.seconds else 0.0


def stage_seconds(task: Task, row: RowCost) -> tuple[int, dict[str, float]]:
    """Estimate the number of training steps, and the seconds of each stage after `sample`, from the cost of a row."""
    options, recipe = task.options, task.options.training
    drawn = min(options.rows, task.rows)
    trained = max(drawn - options.held_out, 1)
    steps = task.recipe(task.planned_spec, {}).steps(trained)
    shares = [1 / speed for speed in options.speedups]
    # × 2: with frozen weights, a backward pass costs as much as a forward pass; the teacher runs once for each row
    tokens = steps * recipe.batch_size * 2 * (row.prompt + row.answer * sum(shares))
    tokens += trained * (row.prompt + row.answer)
    # each of about L steps drops one layer. On average, L/2 layers are left, and a pass runs half of them, L/4
    if task.spec.keep_order == MEASURED:
        tokens += ORDER_ROWS * (row.prompt + row.answer * CANDIDATES * task.resolved.checkpoint.num_layers / 4)
    scored = [1 / (variant.nominal or 1) for variant in task.variants(task.planned_spec, row.prompt_share)]
    evaluated = options.held_out * sum(row.prefill_seconds + row.decode_seconds * share for share in scored)
    return steps, {
        "answers": (drawn if options.responses is None else options.held_out) * row.seconds,
        "tune": tokens * row.prefill_seconds / max(row.prompt, 1.0),
        "before": evaluated,
        "after": options.runs * evaluated,
    }


def speed_accounts(task: Task, row: RowCost, cost: float, parameters: int) -> dict[float, BreakEven]:
    """Estimate what an adaptation that takes `cost` seconds gains at each speed-up of `adapt.speedups` above 1.

    Prompt and decode layers are assumed to take time in proportion to their number, the head in proportion to its
    share of the weights that a decode step reads. parameters: number of the model's parameters.
    """
    checkpoint, answers = task.resolved.checkpoint, task.config.sampling.n
    spec = task.planned_spec.overridden({"horizon": task.spec.horizon or max(2, round(row.answer))})
    tried = [variant for variant in task.variants(spec, row.prompt_share) if variant.nominal != 1]
    head = _head_share(task, parameters)
    full, found = row.prefill_seconds + answers * row.decode_seconds, dict[float, BreakEven]()
    for variant in tried:  # of each speed, the fastest schedule
        schedule = variant.spec.build(checkpoint.num_layers)
        layers = (schedule.mean_depth(round(row.answer)) or schedule.num_layers) / schedule.num_layers
        prompt = len(schedule.prompt_layers) / schedule.num_layers
        fast = row.prefill_seconds * prompt + answers * row.decode_seconds * (head + (1 - head) * layers)
        assert variant.nominal is not None
        account = BreakEven(cost, full, fast, task.rows, working_actors(task.config))
        found[variant.nominal] = min(found.get(variant.nominal, account), account, key=lambda one: one.fast)
    return found


def _head_share(task: Task, parameters: int) -> float:
    """Return the vocabulary head's share of the weights that a decode step at full depth reads."""
    config = task.resolved.checkpoint.config
    head: int = config.vocab_size * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else head  # a step reads only a few rows of it
    return head / max(head, parameters - embedding)


def announcement(task: Task, row: RowCost, done: Collection[str]) -> str:
    """Return a line with the cost and the gain of the adaptation, estimated from the cost of a row at full depth.

    The line shows the number of training steps, the time of each stage that is not in `done`, the memory of the GPU if
    there is one, and the number of rows from which the adaptation pays at each speed.
    """
    steps, seconds = stage_seconds(task, row)
    left = {stage: value for stage, value in seconds.items() if stage not in done}
    low, high = (duration(sum(left.values()) * factor) for factor in (1 / SPREAD, SPREAD))
    parts = ", ".join(f"{stage} {duration(value)}" for stage, value in left.items())
    text = f"estimate: {steps:,} training steps; {low} to {high} left on this machine; by stage: {parts}"
    checkpoint = task.resolved.checkpoint
    parameters = memory_needed(checkpoint, "float32", 0, task.resolved.tensors(), on_gpu=True).parameters
    if torch.cuda.is_available() and "tune" not in done:
        total, training = torch.cuda.get_device_properties(0).total_memory, task.options.training
        speeds = training.speeds_per_step or len(task.options.speedups)
        step = training.batch_size * (row.prompt + row.answer * speeds)
        need = gpu_bytes(task.recipe(task.planned_spec, {}), checkpoint.config, parameters, round(step), total)
        text += f"; the training needs about {gib(need)} of the GPU's {gib(total)}"
    cost = sum(value for stage, value in seconds.items() if stage != "before")  # "before" only fills the table
    pays = [
        f"never at {speed:g}x" if one.at_rows is None else f"from {one.at_rows:,} rows on at {speed:g}x"
        for speed, one in speed_accounts(task, row, cost, parameters).items()
    ]
    return f"{text}; pays {', '.join(pays)}; this job has {task.rows:,}"
