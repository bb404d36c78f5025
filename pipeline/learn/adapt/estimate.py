"""The steps and minutes that an adaptation will take, before a model is loaded: arithmetic over a measured rate."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from statistics import fmean

import torch

from actors.engine.model.families import ModelShape
from actors.engine.schedule.schedule import MEASURED
from pipeline.learn.adapt import configs
from pipeline.learn.adapt.pairs import prompts_isolated
from pipeline.learn.adapt.plan import Task
from pipeline.learn.keep_order import ROWS as ORDER_ROWS
from pipeline.messages import duration
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.storage.parquet import read_parquet

SAMPLED = 32  # rows whose prompts are tokenized
LABEL_TOKENS = 3.0  # of an answer that is one of the choices; a free text is taken to have half of its limit
EFFICIENCY = 0.4  # of the rate of large products that a pass over tokens reaches
SPREAD = 2.0  # the interval: from the estimate ÷ this to the estimate × this


def announcement(task: Task, done: Collection[str]) -> str:
    """Return a line with the steps of the training and the time of the stages that are not in `done`."""
    rows = (task.folder / configs.SAMPLE).read_bytes()
    sample = read_parquet(rows, task.schema.names).slice(0, SAMPLED)
    spec = prompt_spec(task.config, task.resolved, 0.0)
    known = [len(ids) for ids in prompts_isolated(sample, spec) if ids is not None]
    limit = task.config.sampling.max_new_tokens
    answer = LABEL_TOKENS if task.config.choices is not None else limit / 2
    steps, passes = work(task, fmean(known) if known else 0.0, answer)
    left = {stage: tokens for stage, tokens in passes.items() if stage not in done}
    seconds = {
        stage: tokens * 2 * parameters(task) / (EFFICIENCY * products_per_second()) for stage, tokens in left.items()
    }
    total = sum(seconds.values())
    parts = ", ".join(f"{stage} {duration(value)}" for stage, value in seconds.items())
    return (
        f"estimate: {steps:,} training steps; {duration(total / SPREAD)} to {duration(total * SPREAD)} in all on this "
        f"machine, about: {parts}"
    )


def work(task: Task, prompt: float, answer: float) -> tuple[int, dict[str, float]]:
    """Return the steps of the training, and the tokens by stage that run all layers forward, a pass back counted too.

    Args:
        prompt: tokens of a prompt.
        answer: tokens of an answer.
    """
    options = configs.options(task.config)
    recipe = configs.tune_config(task.config, task.shape, ".", 4, task.folder, task.source, ["full"]).training
    drawn = min(options.rows, task.rows)
    trained = max(drawn - options.held_out, 1)
    steps = (
        recipe.max_steps if recipe.max_steps > 0 else math.ceil(math.ceil(trained / recipe.batch_size) * recipe.epochs)
    )
    depths = [1 / speed for speed in options.speedups]
    layers = ModelShape.of(task.resolved.checkpoint.config).layers
    # a step runs forward and back, which costs as much again without gradients of weights; the teacher runs once
    training = steps * recipe.batch_size * 2 * (prompt + answer * sum(depths)) + trained * (prompt + answer)
    if task.shape["keep_order"] == MEASURED:  # up to six layers are tried in each step, over half of those left
        training += ORDER_ROWS * (prompt + answer * 6 * layers / 4)
    evaluated = options.held_out * sum(prompt + answer * depth for depth in [1.0, *depths])
    return steps, {
        "answers": drawn * (prompt + answer),
        "tune": training,
        "before": evaluated,
        "after": options.runs * evaluated,
    }


def parameters(task: Task) -> float:
    """Return the number of weights that a token is multiplied with."""
    shape = ModelShape.of(task.resolved.checkpoint.config)
    attention = 2 * shape.hidden * shape.head_dim * (shape.query_heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.feed_forward) + shape.vocab * shape.hidden


def products_per_second() -> float:
    """Return the floating-point operations per second of this machine's large products, in 0.2 s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix, count, began = torch.ones(1024, 1024, device=device), 0, time.perf_counter()
    while time.perf_counter() - began < 0.2:
        total = (matrix @ matrix).sum().item()  # waits for the device
        assert total
        count += 1
    return 2 * 1024**3 * count / (time.perf_counter() - began)
