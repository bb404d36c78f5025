"""The plan of a training, checked before weights are loaded: tokenizer, architecture, token ids, schedules."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from actors.engine.checkpoint.families import context_length
from actors.engine.checkpoint.loading import inspect, load_tokenizer
from actors.engine.errors import UserError
from actors.engine.schedules.schedule import MEASURED, Schedule, ScheduleSpec
from pipeline.checkpoints.variants import comparison_schedules
from pipeline.config.tune import TuneConfig
from pipeline.tune.adapters import check_targets, started
from pipeline.tune.data import encode, read_pairs

SHAPE = {"decay", "warmup", "keep_order", "prompt"}  # keys kept from the start checkpoint's schedule


@dataclass(frozen=True)
class TrainingPlan:
    """Inputs of a training.

    train, dev: rows for `collate`. spec: the schedule to store. schedules: those that a step is drawn from, by name.
    """

    tokenizer: PreTrainedTokenizerBase
    architecture: PretrainedConfig
    train: Sequence[Mapping[str, Any]]
    dev: Sequence[Mapping[str, Any]]
    spec: ScheduleSpec
    schedules: Mapping[str, Schedule]


def plan_training(config: TuneConfig) -> TrainingPlan:
    """Read the data and inspect the checkpoints; loads no weights. Raises UserError of one line for a mistake.

    A keep order to measure is the paper's until `with_order`.
    """
    data = config.data
    train_pairs = read_pairs(data, data.train, data.train_reference)
    dev_pairs = read_pairs(data, data.dev, data.dev_reference)
    teacher, start = None, inspect(config.model.path)
    architecture, stored = start.config, start.spec
    if config.adapter is not None and config.adapter.start is not None:
        stored = started(start, config.adapter.start).spec
    tokenizer = load_tokenizer(config.model.path)
    if config.loss.teacher is not None:
        teacher = inspect(config.loss.teacher)
        if load_tokenizer(config.loss.teacher).get_vocab() != tokenizer.get_vocab():
            raise UserError(f"loss.teacher: {config.loss.teacher} has another tokenizer than the model to train")
    if config.adapter is not None:
        check_targets(config.adapter, architecture)
    longest = min([data.max_tokens, context_length(architecture), *([teacher.context_length] if teacher else [])])
    train = encode(tokenizer, train_pairs, longest, architecture.vocab_size)
    dev = encode(tokenizer, dev_pairs, longest, architecture.vocab_size)
    if not train or not dev:
        raise UserError(f"data: no pair within {longest} tokens, by max_tokens or the model's context")
    kept = min(len(dev), data.dev_rows)
    dev = [dev[row * len(dev) // kept] for row in range(kept)]
    if len(dev) < 2:
        raise UserError(f"{data.dev[0]}: a dev set of one pair says nothing: give at least two")
    spec = _spec(config, stored, train)
    schedules = _schedules(config, spec, architecture.num_hidden_layers)
    return TrainingPlan(tokenizer, architecture, train, dev, spec, schedules)


def with_order(config: TuneConfig, plan: TrainingPlan) -> TrainingPlan:
    """The plan with the keep order and warm-up of `config`, where they were to be measured."""
    order = config.schedule.keep_order
    assert isinstance(order, list)
    spec = plan.spec.overridden({"keep_order": tuple(order), "warmup": config.schedule.warmup})
    return replace(plan, spec=spec, schedules=_schedules(config, spec, plan.architecture.num_hidden_layers))


def _spec(config: TuneConfig, stored: ScheduleSpec | None, rows: Sequence[Mapping[str, Any]]) -> ScheduleSpec:
    """The schedule to store: the default speed, and the horizon for every job of this checkpoint.

    Keys that the recipe leaves out are the start checkpoint's, but for the horizon, which follows from the data.
    """
    schedule = config.schedule
    lengths = [len(row["input_ids"]) - row["prompt_tokens"] for row in rows]
    changes: dict[str, Any] = {
        "speedup": schedule.default or schedule.speedups[-1],
        "horizon": schedule.horizon or max(2, int(statistics.median(lengths))),
    }
    for key in SHAPE & schedule.model_fields_set:
        value = getattr(schedule, key)
        changes[key] = tuple(value) if isinstance(value, list) else value
    if schedule.keep_order == MEASURED:
        changes["keep_order"] = "paper"
    return (stored or ScheduleSpec()).overridden(changes)


def _schedules(config: TuneConfig, spec: ScheduleSpec, layers: int) -> dict[str, Schedule]:
    """The schedules that a step may be drawn from, by name; of equal ones the first; for an adapter none at 1x."""
    schedules = {f"{speed:g}x": spec.overridden({"speedup": speed}).build(layers) for speed in config.schedule.speedups}
    for further in config.schedule.also:
        changes = further.changes()
        name = " ".join(f"{key}={value}" for key, value in changes.items())
        schedules[name] = spec.overridden(changes).build(layers)
    if config.schedule.compare is not None:
        assert spec.horizon is not None
        learned = config.schedule.learned_order
        schedules |= comparison_schedules(spec, layers, config.schedule.compare, spec.horizon, learned)
    unique = {json.dumps(schedule.to_dict()): name for name, schedule in reversed(schedules.items())}
    drawn = {name: schedule for name, schedule in schedules.items() if name in unique.values()}
    if config.adapter is None:
        return drawn
    if all(schedule.is_full_depth for schedule in drawn.values()):
        raise UserError("schedule.speedups: an adapter is for speeds above 1x, and none is given: add one, such as 2")
    return {name: schedule for name, schedule in drawn.items() if not schedule.is_full_depth}
