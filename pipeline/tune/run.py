"""`skipdecode tune`: adapt a checkpoint to a schedule, or to any speed, or train a new one from scratch.

The flow: read and check everything, then model and trainer, then the checkpoint. How a batch is computed is in
`training.py`; several processes are in `tune_workers.py`.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.families import context_length, family_of
from actors.engine.loading import inspect, load_decoder, load_tokenizer
from actors.engine.schedule import Schedule, ScheduleSpec
from actors.engine.schedule_file import save_spec
from actors.engine.schedule_variants import named
from pipeline.config.tune import TuneConfig
from pipeline.tune import lora
from pipeline.tune import resume as tune_state
from pipeline.tune.data import collate, encode, read_pairs
from pipeline.tune.new_model import new_config, train_tokenizer
from pipeline.tune.trainer import SkipTrainer, Teacher

log = logging.getLogger(__name__)
SHAPE = {"decay", "warmup", "keep_order", "prompt"}


@dataclass(frozen=True)
class Plan:
    """All that is settled before weights are loaded. train, dev: rows for `collate`."""

    tokenizer: PreTrainedTokenizerBase
    architecture: PretrainedConfig
    train: Sequence[Mapping[str, Any]]
    dev: Sequence[Mapping[str, Any]]
    spec: ScheduleSpec
    schedules: Mapping[str, Schedule]


def tune(config: TuneConfig, source: str) -> Path:
    """Train as `config` says and write the checkpoint; a run that was cut off goes on where it stopped.

    source: the recipe's file, for messages. Raises ValueError of one line, before anything is trained, if
    configuration or data are wrong.
    """
    plan = _plan(config)
    if tune_state.finished(config):
        log.warning("%s is finished; nothing is left to do", config.output)
        return Path(config.output)
    tune_state.begin(config)
    if config.workers is None:
        train(config, plan)
    else:
        from pipeline.tune.workers import train_in_workers

        train_in_workers(config)
    return Path(config.output)


def _plan(config: TuneConfig) -> Plan:
    data = config.data
    train_pairs = read_pairs(data, data.train, data.train_reference)
    dev_pairs = read_pairs(data, data.dev, data.dev_reference)
    stored = teacher = None
    if config.model.path is not None:
        start = inspect(config.model.path)
        architecture, stored = start.config, start.spec
        tokenizer = load_tokenizer(config.model.path)
    else:
        assert config.model.new is not None
        tokenizer = train_tokenizer(train_pairs, config.model.vocab_size)
        architecture = new_config(config.model.new, tokenizer)
    if config.loss.teacher is not None:
        teacher = inspect(config.loss.teacher)
        if load_tokenizer(config.loss.teacher).get_vocab() != tokenizer.get_vocab():
            raise UserError(f"loss.teacher: {config.loss.teacher} has another tokenizer than the model to train")
    if config.lora is not None:
        lora.check_targets(config.lora, architecture)
    longest = min([data.max_tokens, context_length(architecture), *([teacher.context_length] if teacher else [])])
    rows = encode(tokenizer, train_pairs, longest, architecture.vocab_size)
    dev = encode(tokenizer, dev_pairs, longest, architecture.vocab_size)
    if not rows or not dev:
        raise UserError(f"data: no pair within {longest} tokens, by max_tokens or the model's context")
    kept = min(len(dev), data.dev_rows)
    dev = [dev[place * len(dev) // kept] for place in range(kept)]
    if len(dev) < 2:
        raise UserError(f"{data.dev[0]}: a dev set of one pair says nothing: give at least two")
    spec = _spec(config, stored, rows)
    return Plan(tokenizer, architecture, rows, dev, spec, _schedules(config, spec, architecture.num_hidden_layers))


def _spec(config: TuneConfig, stored: ScheduleSpec | None, rows: Sequence[Mapping[str, Any]]) -> ScheduleSpec:
    """The spec to store: the default speed, and the horizon that every job of this checkpoint will use.

    What the recipe leaves out is as the start checkpoint has it, but the horizon, which follows from the data.
    """
    asked = config.schedule
    lengths = [len(row["input_ids"]) - row["prompt_tokens"] for row in rows]
    changes: dict[str, Any] = {
        "speedup": asked.default or asked.speedups[-1],
        "horizon": asked.horizon or max(2, int(statistics.median(lengths))),
    }
    for key in SHAPE & asked.model_fields_set:
        value = getattr(asked, key)
        changes[key] = tuple(value) if isinstance(value, list) else value
    return (stored or ScheduleSpec()).overridden(changes)


def _schedules(config: TuneConfig, spec: ScheduleSpec, layers: int) -> dict[str, Schedule]:
    """What a step may be drawn from, by name; of equal ones the first."""
    found = {f"{speed:g}x": spec.overridden({"speedup": speed}).build(layers) for speed in config.schedule.speedups}
    for one in config.schedule.also:
        changes = one.changes()
        name = " ".join(f"{key}={value}" for key, value in changes.items())
        found[name] = spec.overridden(changes).build(layers)
    if config.schedule.compare is not None:
        assert spec.horizon is not None
        learned = config.schedule.learned_order
        found |= named(spec, layers, config.schedule.compare, spec.horizon, learned)
    unique = {json.dumps(one.to_dict()): name for name, one in reversed(found.items())}
    return {name: one for name, one in found.items() if name in unique.values()}


def train(config: TuneConfig, plan: Plan | None = None, asked: TuneConfig | None = None) -> None:
    """The training itself, in this process: alone, or as one of several workers.

    asked: the config as the user gave it, for the record; default `config`.
    """
    plan = plan or _plan(config)
    began = time.monotonic()
    settings = config.training
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = _model(config, plan)
    workers = config.workers.count if config.workers else 1
    state = tune_state.folder(config)
    on_cpu = _on_cpu(config)
    decoder = Decoder(model)
    adapted: Any = model if config.lora is None else lora.add_adapters(model, config.lora)
    if settings.compile:
        decoder.compile()
    arguments = TrainingArguments(
        output_dir=str(state),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size // (workers * settings.accumulation),
        per_device_eval_batch_size=settings.batch_size // (workers * settings.accumulation),
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        bf16=settings.bf16,
        use_cpu=on_cpu,
        seed=settings.seed,
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        # the best weights are among those saved
        save_steps=settings.save_steps if settings.early_stopping is None else settings.eval_steps,
        save_total_limit=1,
        load_best_model_at_end=settings.early_stopping is not None,
        metric_for_best_model="eval_loss",
        restore_callback_states_from_checkpoint=settings.early_stopping is not None,
        logging_steps=20,
        report_to=[],
        dataloader_pin_memory=False,
        # layers that neither prompt nor response runs have no gradient in that step
        ddp_find_unused_parameters=any(one.prompt != "full" for one in plan.schedules.values()),
    )
    assert arguments.device  # settles the number of GPUs, of which a process uses one
    arguments._n_gpu = min(arguments._n_gpu, 1)
    trainer = SkipTrainer(
        model=adapted,
        args=arguments,
        data_collator=collate,
        train_dataset=plan.train,
        eval_dataset=plan.dev,
        decoder=decoder,
        schedules=plan.schedules,
        loss=config.loss,
        teacher=_teacher(config, decoder, adapted, arguments.device),
        recompute=settings.checkpointing,
        callbacks=[] if settings.early_stopping is None else [EarlyStoppingCallback(settings.early_stopping)],
    )
    last = tune_state.last_checkpoint(config)
    if last is not None:
        log.warning("resuming from %s", last)
    trainer.train(resume_from_checkpoint=last)
    losses = trainer.evaluate()
    if trainer.is_world_process_zero():
        record = {
            "config": (asked or config).model_dump(mode="json"),
            "steps": trainer.state.global_step,
            "resumed_at_step": 0 if last is None else int(last.rsplit("-", 1)[-1]),
            "seconds": round(time.monotonic() - began, 1),
            "dev_loss": {name: round(value, 4) for name, value in losses.items()},
            "loss": [
                {"step": one["step"], "loss": round(float(one["loss"]), 4)}
                for one in trainer.state.log_history
                if "loss" in one
            ],
        }
        _save(config, plan, adapted, record)


def _model(config: TuneConfig, plan: Plan) -> PreTrainedModel:
    """The model to train, weights in fp32."""
    # eager attention: at lengths of a few hundred 1.3 times the speed of sdpa's backward on CPU
    attention = "eager" if _on_cpu(config) else family_of(plan.architecture).attention
    model: Any
    if config.model.path is None:
        model = AutoModelForCausalLM.from_config(plan.architecture, attn_implementation=attention)
        log.warning("new model: %.2fM parameters", sum(one.numel() for one in model.parameters()) / 1e6)
    else:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
        model, found = loaded
        if found["missing_keys"]:  # the library would train on random weights in their place
            raise UserError(f"{config.model.path}: no weights for {sorted(found['missing_keys'])[0]}")
    return model  # type: ignore[no-any-return]


def _on_cpu(config: TuneConfig) -> bool:
    return not torch.cuda.is_available() or (config.workers is not None and config.workers.gpus == 0)


def _teacher(config: TuneConfig, student: Decoder, adapted: Any, device: torch.device) -> Teacher | None:
    if config.loss.distillation == 0:
        return None
    if config.loss.teacher is None and config.lora is not None:
        return Teacher(student, adapted.disable_adapter)  # the start weights are still there
    path = config.loss.teacher or config.model.path
    assert path is not None
    return Teacher(load_decoder(path, torch.bfloat16 if config.training.bf16 else torch.float32, device))


def _save(config: TuneConfig, plan: Plan, adapted: Any, record: Mapping[str, Any]) -> None:
    model: Any = lora.merged(adapted) if config.lora is not None and config.lora.merge else adapted
    model.config._attn_implementation = "sdpa"
    model.to(torch.bfloat16 if config.training.bf16 else torch.float32)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, safe_serialization=True)
        plan.tokenizer.save_pretrained(folder)
        save_spec(plan.spec, plan.architecture.num_hidden_layers, folder)

    tune_state.finish(config, save, record)
