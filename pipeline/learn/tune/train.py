"""A training in this process, from its plan to the saved checkpoint: alone, or as one of several workers."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PreTrainedModel, TrainingArguments

from actors.engine.cpu.products import give_memory_back
from actors.engine.decoder import Decoder
from actors.engine.library import packed_attention
from actors.engine.machine import set_threads
from actors.engine.model.families import ModelShape
from actors.engine.model.loading import load_decoder, load_model
from actors.engine.schedule.file import Trained, save_spec
from pipeline.config.tune import TuneConfig
from pipeline.learn.tune import adapters, resume
from pipeline.learn.tune.lean_layers import make_lean
from pipeline.learn.tune.plan import TrainingPlan
from pipeline.learn.tune.trainer import KEY, SkipTrainer, Teacher, collate_pairs

log = logging.getLogger(__name__)

ACTIVATIONS = 3 * 2**30  # bytes kept for the backward pass of a micro-batch on a CPU
MIN_TOKENS = 256


def train(config: TuneConfig, plan: TrainingPlan, recorded: TuneConfig | None = None) -> None:
    """Train in this process, and save the checkpoint and `tune.json` into `config.output`.

    Call `resume.begin` first. Training continues from the last saved step, if there is one. Among several workers only
    the first one saves.

    recorded: the config that is written to `tune.json`, with the paths as the user wrote them; default `config`.
    """
    began = time.monotonic()
    set_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    trainer = _trainer(config, plan)
    last = resume.last_checkpoint(config)
    if last is not None:
        log.warning("resuming from %s", last)
    processor = time.process_time()
    with kept_heap():
        trained = trainer.train(resume_from_checkpoint=last)
    processor = time.process_time() - processor
    losses = _last_losses(trainer) or trainer.evaluate()
    if trainer.is_world_process_zero():
        record = {
            "config": (recorded or config).model_dump(mode="json"),
            "steps": trainer.state.global_step,
            "resumed_at_step": 0 if last is None else int(last.rsplit("-", 1)[-1]),
            "seconds": round(time.monotonic() - began, 1),
            "step_seconds": round(trained.metrics["train_runtime"], 2),  # without loading, saving and the last losses
            "step_processor_seconds": round(processor, 2),
            "dev_loss": {name: round(value, 4) for name, value in losses.items()},
            "loss": [
                {"step": entry["step"], "loss": round(float(entry["loss"]), 4)}
                for entry in trainer.state.log_history
                if "loss" in entry
            ],
        }
        _save(config, plan, trainer.model, record)


def _last_losses(trainer: SkipTrainer) -> dict[str, float]:
    """Dev-set losses that were computed after the last step; empty if the best weights were loaded since."""
    if trainer.args.load_best_model_at_end:
        return {}
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    return {name: value for entry in last for name, value in entry.items() if name.startswith("eval_loss")}


def _trainer(config: TuneConfig, plan: TrainingPlan) -> SkipTrainer:
    settings, workers = config.training, config.workers.count if config.workers else 1
    model = _load_model(config, plan)
    decoder = Decoder(model)
    adapted: Any = model if config.adapter is None else adapters.add_adapters(model, config.adapter)
    arguments = training_arguments(config, plan)
    if config.adapter is not None:
        if arguments.bf16:
            adapters.round_frozen(model)
        make_lean(adapted)
    stopping = settings.early_stopping
    early_stopping = [] if stopping is None else [EarlyStoppingCallback(stopping)]
    keyed = _with_keys(plan.train, "train") if arguments.num_train_epochs > 1 or arguments.max_steps > 0 else plan.train
    return SkipTrainer(
        model=adapted,
        args=arguments,
        data_collator=collate_pairs,
        train_dataset=keyed,
        eval_dataset=_with_keys(plan.dev, "dev"),
        decoder=decoder,
        schedules=plan.schedules,
        together=settings.speeds_per_step,
        loss=config.loss,
        teacher=_teacher(config, decoder, adapted, arguments.device, arguments.bf16),
        tokens=settings.micro_batch_tokens or tokens_at_once(model, arguments, workers),
        prompt_gradient=settings.prompt_gradient,
        recompute=settings.checkpointing,
        callbacks=early_stopping,
    )


def _with_keys(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{**row, KEY: (name, number)} for number, row in enumerate(rows)]


def tokens_at_once(model: PreTrainedModel, arguments: TrainingArguments, workers: int = 1) -> int:
    """Tokens whose activations fit `ACTIVATIONS` bytes, on a GPU a quarter of its memory; about as many as measured.

    workers: that share the bytes, or have a GPU each.
    """
    shape = ModelShape.of(model.config)
    of_layer = (14 * shape.hidden + 5 * shape.feed_forward) * (2 if arguments.bf16 else 4)
    available = ACTIVATIONS // workers
    if arguments.device.type == "cuda":
        available = torch.cuda.get_device_properties(arguments.device).total_memory // 4
    return max(MIN_TOKENS, available // (shape.layers * of_layer))


def training_arguments(config: TuneConfig, plan: TrainingPlan) -> TrainingArguments:
    """The Trainer's settings."""
    settings = config.training
    workers = config.workers.count if config.workers else 1
    early_stopping = settings.early_stopping is not None
    arguments = TrainingArguments(
        output_dir=str(resume.folder(config)),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size // workers,
        per_device_eval_batch_size=settings.batch_size // workers,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        bf16=settings.bf16 and _has_bf16(_on_cpu(config)),
        use_cpu=_on_cpu(config),
        seed=settings.seed,
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        save_steps=settings.eval_steps if early_stopping else settings.save_steps,  # the best weights must be saved
        save_total_limit=1,
        load_best_model_at_end=early_stopping,
        metric_for_best_model="eval_loss",
        restore_callback_states_from_checkpoint=early_stopping,
        logging_steps=20,
        disable_tqdm=True,  # see StepProgress
        report_to=[],
        dataloader_pin_memory=False,
        # layers that neither prompt nor response runs have no gradient in that step
        ddp_find_unused_parameters=any(schedule.prompt != "full" for schedule in plan.schedules.values()),
    )
    assert arguments.device  # sets the number of GPUs; a process uses one
    arguments._n_gpu = min(arguments._n_gpu, 1)
    return arguments


def _load_model(config: TuneConfig, plan: TrainingPlan) -> PreTrainedModel:
    """The model to train, weights in fp32."""
    return load_model(config.model.path, torch.float32, None, packed_attention.register())


def _on_cpu(config: TuneConfig) -> bool:
    return not torch.cuda.is_available() or (config.workers is not None and config.workers.gpus == 0)


def _teacher(config: TuneConfig, student: Decoder, adapted: Any, device: torch.device, bf16: bool) -> Teacher | None:
    if config.loss.distillation == 0:
        return None
    if config.loss.teacher is None and config.adapter is not None:
        # the start weights, which the adapters leave unchanged
        return Teacher(student, config.loss, student.vocab_size, adapted.disable_adapter)
    path = config.loss.teacher or config.model.path
    decoder = load_decoder(path, torch.bfloat16 if bf16 else torch.float32, device)
    decoder.model.config._attn_implementation = packed_attention.register()
    return Teacher(Decoder(decoder.model), config.loss, student.vocab_size)


def _has_bf16(on_cpu: bool) -> bool:
    """Whether the device has bfloat16 instructions; without, a CPU computes it slower than float32."""
    if on_cpu:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _dtype(config: TuneConfig) -> torch.dtype:
    return torch.bfloat16 if config.training.bf16 else torch.float32


def _save(config: TuneConfig, plan: TrainingPlan, trained: Any, record: dict[str, Any]) -> None:
    layers = plan.architecture.num_hidden_layers

    def save(folder: Path) -> None:
        if config.adapter is not None:
            adapters.save_adapters(trained, config.model.path, folder)
        else:
            trained.config._attn_implementation = "sdpa"
            trained.to(_dtype(config)).save_pretrained(folder, safe_serialization=True)
            plan.tokenizer.save_pretrained(folder)
        save_spec(plan.spec, layers, folder, Trained.on(plan.spec.build(layers), plan.schedules.values()))

    resume.finish(config, save, record)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGEST = 32 * 2**20  # bytes; the C library's own limit of MMAP_THRESHOLD
DEFAULT = 128 * 2**10


@contextmanager
def kept_heap() -> Iterator[None]:
    """In the block the C library returns no memory to the system, but for pieces above `LARGEST` bytes.

    Activations are freed in the backward pass and needed again by the next step: without this the system clears each of
    their pages at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is None:
        yield
        return
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        mallopt(TRIM_THRESHOLD, DEFAULT)
        mallopt(MMAP_THRESHOLD, DEFAULT)
        give_memory_back()
