"""What the stages of an adaptation take, from measured seconds of the job's own rows at full depth."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from actors.engine.schedule.schedule import MEASURED
from pipeline.learn.adapt import configs
from pipeline.learn.adapt.configs import Task
from pipeline.learn.keep_order import CANDIDATES
from pipeline.learn.keep_order import ROWS as ORDER_ROWS
from pipeline.learn.tune.plan import training_steps
from pipeline.messages import duration

SPREAD = 2.0  # the interval is from the estimate ÷ SPREAD to the estimate × SPREAD


@dataclass(frozen=True)
class RowCost:
    """Mean cost of a row at full depth: tokens of prompt and answer, seconds of prompt and of decode steps."""

    prompt: float
    answer: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the row's prompt and decode steps."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def pass_seconds(self) -> float:
        """Seconds of a token in a pass over many tokens, such as a training step."""
        return self.prefill_seconds / max(self.prompt, 1.0)


def stage_seconds(task: Task, row: RowCost) -> tuple[int, dict[str, float]]:
    """Return the steps of the training, and the seconds of each stage after the sample."""
    options, recipe = task.options, configs.tune_config(task, ".", 4, ["full"]).training
    drawn = min(options.rows, task.rows)
    trained = max(drawn - options.held_out, 1)
    steps = training_steps(recipe, trained)
    shares = [1 / speed for speed in options.speedups]
    # a step runs forward and back, which costs as much again without gradients of weights; the teacher runs once
    tokens = steps * recipe.batch_size * 2 * (row.prompt + row.answer * sum(shares))
    tokens += trained * (row.prompt + row.answer)
    if task.shape["keep_order"] == MEASURED:  # candidates are tried for each layer, over half of those left
        tokens += ORDER_ROWS * (row.prompt + row.answer * CANDIDATES * task.resolved.checkpoint.num_layers / 4)
    evaluated = options.held_out * sum(row.prefill_seconds + row.decode_seconds * share for share in [1.0, *shares])
    return steps, {
        "answers": drawn * row.seconds,
        "tune": tokens * row.pass_seconds,
        "before": evaluated,
        "after": options.runs * evaluated,
    }


def announcement(task: Task, row: RowCost, done: Collection[str]) -> str:
    """Return a line with the steps of the training and the time of the stages that are not in `done`."""
    steps, seconds = stage_seconds(task, row)
    left = {stage: value for stage, value in seconds.items() if stage not in done}
    low, high = (duration(sum(left.values()) * factor) for factor in (1 / SPREAD, SPREAD))
    parts = ", ".join(f"{stage} {duration(value)}" for stage, value in left.items())
    return f"estimate: {steps:,} training steps; {low} to {high} more on this machine, about: {parts}"
