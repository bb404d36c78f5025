"""Runs a training, from the plan to the saved checkpoint."""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.engine.cpu.products import give_memory_back
from actors.engine.decoder import Decoder
from actors.engine.machine import set_threads
from actors.engine.model.families import ModelShape
from actors.engine.model.loading import load_decoder, load_model
from actors.engine.schedule.file import Trained, save_spec
from actors.engine.torch import packed_attention
from pipeline.config.tune import TuneConfig
from pipeline.learn.tune import adapters, resume
from pipeline.learn.tune.plan import TrainingPlan
from pipeline.learn.tune.trainer import LOSS, Teacher, Training

log = logging.getLogger(__name__)

ACTIVATIONS = 3 * 2**30  # bytes of activations that a micro-batch may keep for the backward pass on a CPU
MIN_TOKENS = 256  # a micro-batch may always have this many tokens


def train(config: TuneConfig, plan: TrainingPlan) -> None:
    """Train, and save the weights of the best step and `tune.json` into `config.output`.

    Call `resume.begin` first. Training resumes from the last saved step, if there is one.
    """
    began = time.monotonic()
    set_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    training = _training(config, plan)
    with kept_heap():
        training.run()
    first, last, kept = training.dev_losses[0], training.dev_losses[-1], training.load_best()
    harmed = harm(first, kept if kept["step"] > 0 else last)
    if not math.isfinite(last[LOSS]):
        reason = f"the training stopped at step {last['step']}: its dev-set loss is {last[LOSS]}"
        harmed.insert(0, f"{reason}; lower training.learning_rate")
    for line in harmed:
        log.warning("%s", line)

    def rounded(entries: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
        """Round losses. Replace NaN and infinity by None, because JSON lacks them."""
        return [
            {name: round(value, 4) if math.isfinite(value) else None for name, value in entry.items()}
            for entry in entries
        ]

    record = {
        "config": config.model_dump(mode="json"),
        "steps": training.step,
        "resumed_at_step": training.began_at,
        "kept_step": kept.pop("step"),
        "harmed": harmed,
        "seconds": round(time.monotonic() - began, 1),
        "dev_loss": rounded([kept])[0],
        "dev_losses": rounded(training.dev_losses),
    }
    _save(config, plan, training.model, record)


def harm(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return a warning for each schedule whose dev-set loss rose. before, after: step number and losses, by name."""
    return [
        f"the training harmed {name.removeprefix(LOSS + '_')}: its dev-set loss is {value:.3f} nats per token at "
        f"step {after['step']}, and was {before[name]:.3f} at step {before['step']}"
        for name, value in after.items()
        if name not in ("step", LOSS) and not value <= before[name]
    ]


def _training(config: TuneConfig, plan: TrainingPlan) -> Training:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = config.training.bf16 and has_bf16(device)
    model = load_model(config.model.path, torch.float32, None, packed_attention.register()).to(device)  # type: ignore[arg-type]
    decoder = Decoder(model)
    adapted: Any = model if config.adapter is None else adapters.add_adapters(model, config.adapter)
    if config.adapter is not None and bf16:
        adapters.round_frozen(model)
    return Training(
        adapted,
        decoder,
        plan,
        config,
        _teacher(config, decoder, adapted, bf16),
        tokens=config.training.micro_batch_tokens or tokens_at_once(model, bf16),
        bf16=bf16,
    )


def tokens_at_once(model: PreTrainedModel, bf16: bool) -> int:
    """Return the number of tokens whose activations fit `ACTIVATIONS` bytes on a CPU, or 1/4 of a GPU's memory."""
    is_gpu = model.device.type == "cuda"
    available = torch.cuda.get_device_properties(model.device).total_memory // 4 if is_gpu else ACTIVATIONS
    return max(MIN_TOKENS, available // token_bytes(model.config, bf16))


def token_bytes(config: PretrainedConfig, bf16: bool) -> int:
    """Return the bytes of a token's activations that are kept for the backward pass."""
    shape = ModelShape.of(config)
    return shape.layers * (16 * shape.hidden + 6 * shape.feed_forward) * (2 if bf16 else 4)


def gpu_bytes(recipe: TuneConfig, config: PretrainedConfig, parameters: int, tokens: int, memory: int) -> int:
    """Estimate the bytes of GPU memory that a training takes at most.

    config, parameters: of the model. tokens: in a step, without padding. memory: bytes of the GPU. The estimate is the
    sum of weights, gradients, AdamW's two moments, the teacher's weights and a micro-batch's activations.
    """
    bf16 = recipe.training.bf16 and has_bf16(torch.device("cuda"))
    loaded = 4 * parameters  # weights arrive in float32; frozen ones are rounded then
    weights, trained = loaded, parameters
    if recipe.adapter is not None:
        trained = adapters.adapter_parameters(recipe.adapter, config)
        weights = (2 if bf16 else 4) * parameters + 4 * trained
    has_teacher = recipe.loss.distillation > 0 and (recipe.loss.teacher is not None or recipe.adapter is None)
    teacher = (2 if bf16 else 4) * parameters if has_teacher else 0
    activations = min(max(MIN_TOKENS, tokens) * token_bytes(config, bf16), memory // 4)
    return max(loaded, weights + 12 * trained + teacher + activations)


def _teacher(config: TuneConfig, student: Decoder, adapted: Any, bf16: bool) -> Teacher | None:
    if config.loss.distillation == 0:
        return None
    if config.loss.teacher is None and config.adapter is not None:
        # the student with its adapters disabled, that is, the start weights
        return Teacher(student, config.loss, student.vocab_size, adapted.disable_adapter)
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = load_decoder(config.loss.teacher or config.model.path, dtype, student.device)
    decoder.model.config._attn_implementation = packed_attention.register()
    return Teacher(Decoder(decoder.model), config.loss, student.vocab_size)


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has bfloat16 instructions. Without them a CPU computes bfloat16 slower than float32."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _save(config: TuneConfig, plan: TrainingPlan, trained: Any, record: dict[str, Any]) -> None:
    def save(folder: Path) -> None:
        if config.adapter is not None:
            adapters.save_adapters(trained, config.model.path, folder)
        else:
            trained.config._attn_implementation = "sdpa"
            dtype = torch.bfloat16 if config.training.bf16 else torch.float32
            trained.to(dtype).save_pretrained(folder, safe_serialization=True)
            plan.tokenizer.save_pretrained(folder)
        trained_for = Trained.on(plan.spec.build(plan.layers), plan.schedules.values())
        save_spec(plan.spec, plan.layers, folder, trained_for)

    resume.finish(config, save, record)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
LARGEST, DEFAULT = 32 * 2**20, 128 * 2**10  # bytes: largest and default MMAP_THRESHOLD of the C library


@contextmanager
def kept_heap() -> Iterator[None]:
    """Let the C library keep freed memory blocks of up to `LARGEST` bytes for reuse during the `with` block.

    Activations are freed in each backward pass and allocated again in the next step. If the C library returned them to
    the system, the system would clear all their pages at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)  # only glibc has mallopt
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        mallopt(TRIM_THRESHOLD, DEFAULT)
        mallopt(MMAP_THRESHOLD, DEFAULT)
        give_memory_back()
