"""Plans a training before weights are loaded: reads and checks tokenizer, architecture, token ids and schedules."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect
from actors.engine.schedule.file import Trained
from actors.engine.schedule.schedule import MEASURED, Schedule, ScheduleSpec
from pipeline.config.job import StorageConfig
from pipeline.config.tune import TrainingConfig, TuneConfig, TuneDataConfig
from pipeline.input.rows import read_columns
from pipeline.learn.rows import Text, is_text, token_ids
from pipeline.learn.tune.adapters import check_targets, started
from pipeline.prepare.tokenizer import tokenizer_of

log = logging.getLogger(__name__)
Pair = tuple[Text, Text, bool]  # prompt, response, and whether an end-of-sequence token is added to the response
SHAPE = {"decay", "warmup", "keep_order", "prompt"}  # schedule keys that default to the start checkpoint's values


def read_pairs(data: TuneDataConfig, paths: Sequence[str], reference: str) -> list[Pair]:
    """Return the pairs of prompt and response in the files `paths`. A row with several references gives several pairs.

    reference: column with the responses. Raises UserError, with file and row, if a prompt or response is empty or is
    neither text nor token ids, or if `data.choices` does not contain a response.
    """
    pairs: list[Pair] = []
    labels = None if data.choices is None else set(data.choices)
    columns = (data.prompt, reference, *((data.ended,) if data.ended else ()))
    for path in paths:
        read = read_columns(path, columns, StorageConfig())
        ends = read[data.ended] if data.ended else [True] * len(read[data.prompt])
        if not all(isinstance(value, bool) for value in ends):
            raise UserError(f"{path}: column {data.ended} must hold true or false in every row")
        for row, (prompt, value, ended) in enumerate(zip(read[data.prompt], read[reference], ends, strict=True)):
            several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
            responses = value if several else [value]
            for name, one in [(data.prompt, prompt), *((reference, response) for response in responses)]:
                if not is_text(one):
                    raise UserError(f"{path}: row {row}: {name} is empty, or neither text nor token ids")
            for response in responses:
                if labels is not None and (not isinstance(response, str) or response not in labels):
                    raise UserError(f"{path}: row {row}: {response!r} is not one of the {len(labels)} choices")
                if isinstance(response, str):
                    response = " ".join(response.split()) if data.collapse_whitespace else response.strip()
                pairs.append((prompt, response, ended))
    if not pairs:
        raise UserError(f"{paths[0]}: no rows to train or evaluate on")
    return pairs


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], max_tokens: int, vocab_size: int
) -> list[dict[str, Any]]:
    """Return `input_ids` and `prompt_tokens` of each pair. Leave out pairs longer than `max_tokens`, with a warning.

    Raises UserError for a token outside the vocabulary, a prompt or response without a token, or if a pair needs an end
    token and the tokenizer has none.
    """
    prompts, responses, ends = zip(*pairs, strict=True)
    if tokenizer.eos_token_id is None and any(ends):
        raise UserError("the tokenizer has no end-of-sequence token, so the model cannot learn where an answer ends")
    encoded = zip(token_ids(tokenizer, prompts), token_ids(tokenizer, responses, special=False), ends, strict=True)
    rows: list[dict[str, Any]] = []
    for number, (prompt, response, ended) in enumerate(encoded):
        ids = [*prompt, *response, *([tokenizer.eos_token_id] if ended else [])]
        if not prompt or len(ids) == len(prompt) or max(ids) >= vocab_size:
            fault = f"an empty prompt or response, or a token outside the model's vocabulary of {vocab_size}"
            raise UserError(f"pair {number} has {fault}; leave the row out")
        rows.append({"input_ids": ids, "prompt_tokens": len(prompt)})
    fitting = [row for row in rows if len(row["input_ids"]) <= max_tokens]
    if len(fitting) < len(rows):
        left_out = len(rows) - len(fitting)
        log.warning("%d of %d pairs are longer than %d tokens and are left out", left_out, len(rows), max_tokens)
    return fitting


@dataclass(frozen=True)
class TrainingPlan:
    """Inputs of a training.

    layers: number of the model's layers. train, dev: pairs as `encode` returns them. spec: schedule to store.
    schedules: name -> schedule; each training step draws some of them.
    """

    tokenizer: PreTrainedTokenizerBase
    layers: int
    train: Sequence[Mapping[str, Any]]
    dev: Sequence[Mapping[str, Any]]
    spec: ScheduleSpec
    schedules: Mapping[str, Schedule]


def plan_training(config: TuneConfig) -> TrainingPlan:
    """Read the data, inspect the checkpoints without loading weights, and return the plan.

    Raises UserError if the recipe or the data are wrong.

    If the layer order (keep order) is to be measured, the plan holds the paper's order until `with_order` replaces it.
    """
    data = config.data
    train_pairs = read_pairs(data, data.train, data.train_reference)
    dev_pairs = read_pairs(data, data.dev, data.dev_reference)
    start = inspect(config.model.path)
    architecture, stored = start.config, start.spec
    if config.adapter is not None and config.adapter.start is not None:
        stored = started(start, config.adapter.start).spec
    tokenizer = tokenizer_of(config.model.path)
    contexts = [data.max_tokens, start.context_length]
    if config.loss.teacher is not None:
        contexts.append(teacher_context(config.loss.teacher, tokenizer))
    if config.adapter is not None:
        check_targets(config.adapter, architecture)
    longest = min(contexts)
    train, dev = (encode(tokenizer, pairs, longest, architecture.vocab_size) for pairs in (train_pairs, dev_pairs))
    if not train or not dev:
        raise UserError(f"data: every pair is longer than {longest} tokens (data.max_tokens or context); shorten them")
    kept = min(len(dev), data.dev_rows)
    dev = [dev[row * len(dev) // kept] for row in range(kept)]
    if len(dev) < 2:
        raise UserError(f"{data.dev[0]}: one pair is not enough for a dev set: give at least two")
    spec = _spec(config, stored, train)
    schedules = _schedules(config, spec, start.num_layers)
    default = spec.build(start.num_layers)
    if not Trained.on(default, schedules.values()).covers(default):
        raise UserError(f"schedule.default: {spec.speedup:g}x would not be trained: add it to schedule.speedups")
    return TrainingPlan(tokenizer, start.num_layers, train, dev, spec, schedules)


def teacher_context(teacher: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the context length of the checkpoint `teacher`, in tokens.

    Raises UserError if it cannot be read, or if `tokenizer` has another vocabulary.
    """
    try:
        context, vocabulary = inspect(teacher).context_length, tokenizer_of(teacher).get_vocab()
    except UserError as error:
        raise UserError(f"loss.teacher: {error}") from None
    if vocabulary != tokenizer.get_vocab():
        raise UserError(f"loss.teacher: {teacher} has another tokenizer than the model to train")
    return context


def training_steps(settings: TrainingConfig, rows: int) -> int:
    """Return the number of optimizer steps of a training on `rows` pairs."""
    by_epochs = math.ceil(math.ceil(rows / settings.batch_size) * settings.epochs)
    return settings.max_steps if settings.max_steps > 0 else by_epochs


def with_order(config: TuneConfig, plan: TrainingPlan, order: Sequence[int], warmup: int) -> TrainingPlan:
    """Return the plan with a measured layer order and its number of warm-up layers."""
    spec = plan.spec.overridden({"keep_order": order, "warmup": warmup})
    return replace(plan, spec=spec, schedules=_schedules(config, spec, plan.layers))


def _spec(config: TuneConfig, stored: ScheduleSpec | None, rows: Sequence[Mapping[str, Any]]) -> ScheduleSpec:
    """Return the schedule to store in the trained checkpoint. It is the default for jobs with that checkpoint.

    Keys that the recipe leaves out come from `stored`. The horizon, if left out, is the median response length.
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
    """Return name -> schedule to train for. Of equal schedules the first stays; an adapter is not trained at 1x."""
    section = config.schedule
    named: dict[str, dict[str, Any]] = {f"{speed:g}x": {"speedup": speed} for speed in section.speedups}
    for changes in (one.changes() for one in section.also):
        named[" ".join(f"{key}={value}" for key, value in changes.items())] = changes
    schedules = {name: spec.overridden(changes).build(layers) for name, changes in named.items()}
    unique = {json.dumps(schedule.to_dict()): name for name, schedule in reversed(schedules.items())}
    drawn = {name: schedule for name, schedule in schedules.items() if name in unique.values()}
    if config.adapter is None:
        return drawn
    fast = {name: schedule for name, schedule in drawn.items() if not schedule.is_full_depth}
    if not fast:
        raise UserError("schedule.speedups: an adapter needs a speed above 1x: add one, such as 2")
    return fast
