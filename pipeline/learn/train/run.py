"""Trains a checkpoint, or a speed adapter for it, on rows in memory, and saves the weights of the best step.

    rows, Recipe ──> train ─────────────────────────> checkpoint or adapter, tune.json
                     draws schedules at each step

`_training` in the output folder holds the last saved step, from which an interrupted training resumes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.engine.cpu.products import give_memory_back
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.machine import set_threads
from actors.engine.model.families import ModelShape
from actors.engine.model.file_digests import file_digest
from actors.engine.model.loading import load_decoder, load_model
from actors.engine.model.speed_adapter import CONFIG, WEIGHTS, base_digest
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.file import Trained, save_spec
from actors.engine.torch import packed_attention
from actors.engine.torch.forcing import Pair
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.learn.train import adapters
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.trainer import LOSS, STATE_FILE, Teacher, Training
from pipeline.runtime.announce import announce
from pipeline.storage.local_output import replacing

log = logging.getLogger(__name__)

RECORD, STATE, IDENTITY = "tune.json", "_training", "recipe.sha256"
FREE = {"epochs", "max_steps", "threads", "eval_steps", "save_steps"}  # these may change when a training is resumed
ACTIVATIONS = 3 * 2**30  # bytes of activations that a micro-batch may keep for the backward pass on a CPU
MIN_TOKENS = 256  # a micro-batch may always have this many tokens


def train(start: Path, recipe: Recipe, rows: Sequence[Pair], dev: Sequence[Pair], output: Path) -> dict[str, Any]:
    """Train the checkpoint folder `start`. Save the weights of the best step and a record (tune.json) into `output`.

    Training resumes from the last saved step, if there is one. Returns the record.

    Args:
        rows: Pairs of prompt and response to train on, as `input_ids` and `prompt_tokens`.
        dev: Pairs on which the loss of each schedule is measured, to find the best step.

    Raises:
        UserError: `output` holds a saved step of a training that differs in more than `FREE`, or a checkpoint or an
            adapter that no training wrote.
    """
    began, state = time.monotonic(), output / STATE
    _begin(state, _identity(start, recipe, rows, dev))
    announce(f"training {start} on {len(rows):,} pairs, with a dev set of {len(dev):,}; output: {output}")
    set_threads(recipe.training.threads)
    torch.manual_seed(recipe.training.seed)
    training = _training(start, recipe, rows, dev, state)
    with kept_heap():
        training.run()
    first, last, kept = training.dev_losses[0], training.dev_losses[-1], training.load_best()
    harmed = harm(first, kept if kept["step"] > 0 else last)
    if not math.isfinite(last[LOSS]):
        reason = f"the training stopped at step {last['step']}: its dev-set loss is {last[LOSS]}"
        harmed.insert(0, f"{reason}; lower adapt.training.learning_rate")
    for line in harmed:
        log.warning("%s", line)

    def rounded(entries: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
        """Round losses. Replace NaN and infinity by None, because JSON lacks them."""
        return [
            {name: round(value, 4) if math.isfinite(value) else None for name, value in entry.items()}
            for entry in entries
        ]

    record = {
        "start": str(start),
        "pairs": len(rows),
        "schedules": list(recipe.schedules),
        **{name: one.model_dump(mode="json") for name, one in _sections(recipe).items()},
        "bf16": recipe.bf16,
        "steps": training.step,
        "resumed_at_step": training.began_at,
        "kept_step": kept.pop("step"),
        "harmed": harmed,
        "seconds": round(time.monotonic() - began, 1),
        "dev_loss": rounded([kept])[0],
        "dev_losses": rounded(training.dev_losses),
    }
    _save(start, recipe, training, state / "new")
    for path in sorted((state / "new").iterdir()):
        path.replace(output / path.name)
    with replacing(output / RECORD) as temporary:  # last: a folder without it holds no finished training
        temporary.write_text(json.dumps(record, indent=2) + "\n")
    return record


def _sections(recipe: Recipe) -> dict[str, LossConfig | AdapterConfig | TrainingConfig]:
    adapter = {} if recipe.adapter is None else {"adapter": recipe.adapter}
    return {"loss": recipe.loss, **adapter, "training": recipe.training}


def _identity(start: Path, recipe: Recipe, rows: Sequence[Pair], dev: Sequence[Pair]) -> str:
    """Return a digest of all that a resumed training must share: rows, weights, schedules, and keys not in `FREE`."""
    adapter = recipe.adapter.start if recipe.adapter is not None else None
    folders = [str(path) for path in (start, recipe.loss.teacher) if path is not None]
    values = {
        **{name: one.model_dump(mode="json", exclude=FREE) for name, one in _sections(recipe).items()},
        "bf16": recipe.bf16,
        "spec": recipe.spec.to_dict(),
        "schedules": {name: one.to_dict() for name, one in recipe.schedules.items()},
        "weights": [base_digest(Path(folder)) for folder in folders],
        "adapter_weights": adapter and file_digest(Path(adapter) / WEIGHTS, "sha256"),
        "rows": [[list(row["input_ids"]), row["prompt_tokens"]] for row in (*rows, *dev)],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _begin(state: Path, identity: str) -> None:
    """Create the folder `state` and record the digest of the recipe.

    Raises UserError if `state` holds another training, or its parent a checkpoint or adapter that no training wrote.
    """
    recorded, output = state / IDENTITY, state.parent
    if (state / STATE_FILE).exists():
        if not recorded.exists() or recorded.read_text() != identity:
            raise UserError(f"{state}: holds a training with another recipe or other rows; remove this folder")
        return
    is_own = recorded.exists() or (output / RECORD).exists()
    if not is_own and any((output / name).exists() for name in ("config.json", CONFIG)):
        raise UserError(
            f"{output}: holds a checkpoint or adapter, but no {RECORD}; move it away, or choose another folder"
        )
    state.mkdir(parents=True, exist_ok=True)
    recorded.write_text(identity)
    (output / RECORD).unlink(missing_ok=True)  # of an earlier training, whose `_training` was removed


def harm(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return a warning for each schedule whose dev-set loss rose. before, after: step number and losses, by name."""
    return [
        f"the training harmed {name.removeprefix(LOSS + '_')}: its dev-set loss is {value:.3f} nats per token at "
        f"step {after['step']}, and was {before[name]:.3f} at step {before['step']}"
        for name, value in after.items()
        if name not in ("step", LOSS) and not value <= before[name]
    ]


def _training(start: Path, recipe: Recipe, rows: Sequence[Pair], dev: Sequence[Pair], state: Path) -> Training:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = recipe.bf16 and has_bf16(device)
    model = load_student(start, device, frozen_bf16=bf16 and recipe.adapter is not None)
    decoder = Decoder(model)
    adapted: Any = model if recipe.adapter is None else adapters.add_adapters(model, recipe.adapter)
    if recipe.adapter is not None and bf16:
        adapters.round_frozen(model)
    teacher = _teacher(start, recipe, decoder, adapted, bf16)
    tokens = recipe.training.micro_batch_tokens or tokens_at_once(model, bf16)
    return Training(adapted, decoder, recipe, rows, dev, teacher, state, tokens=tokens, bf16=bf16)


def load_student(start: Path, device: torch.device, *, frozen_bf16: bool) -> PreTrainedModel:
    """Load the model to train onto `device`.

    frozen_bf16: whether its weights stay frozen and are used in bfloat16. On a GPU they are then read in this type, so
    that the GPU never holds them in float32. On a CPU, embeddings and norms keep float32, see `adapters.round_frozen`.
    """
    dtype = torch.bfloat16 if frozen_bf16 and device.type != "cpu" else torch.float32
    return load_model(start, dtype, device, packed_attention.register())


def tokens_at_once(model: PreTrainedModel, bf16: bool) -> int:
    """Return the number of tokens whose activations fit `ACTIVATIONS` bytes on a CPU, or 1/4 of a GPU's memory."""
    is_gpu = model.device.type == "cuda"
    available = torch.cuda.get_device_properties(model.device).total_memory // 4 if is_gpu else ACTIVATIONS
    return max(MIN_TOKENS, available // token_bytes(model.config, bf16))


def token_bytes(config: PretrainedConfig, bf16: bool) -> int:
    """Return the bytes of a token's activations that are kept for the backward pass."""
    shape = ModelShape.of(config)
    return shape.layers * (16 * shape.hidden + 6 * shape.feed_forward) * (2 if bf16 else 4)


def gpu_bytes(recipe: Recipe, config: PretrainedConfig, parameters: int, tokens: int, memory: int) -> int:
    """Estimate the bytes of GPU memory that a training takes at most.

    config, parameters: of the model. tokens: in a step, without padding. memory: bytes of the GPU. The estimate is the
    sum of weights, gradients, AdamW's two moments, the teacher's weights and a micro-batch's activations.
    """
    bf16 = recipe.bf16 and has_bf16(torch.device("cuda"))
    weights, trained = 4 * parameters, parameters
    if recipe.adapter is not None:
        trained = adapters.adapter_parameters(recipe.adapter, config)
        weights = (2 if bf16 else 4) * parameters + 4 * trained
    has_teacher = recipe.loss.distillation > 0 and (recipe.loss.teacher is not None or recipe.adapter is None)
    teacher = (2 if bf16 else 4) * parameters if has_teacher else 0
    activations = min(max(MIN_TOKENS, tokens) * token_bytes(config, bf16), memory // 4)
    return weights + 12 * trained + teacher + activations


def _teacher(start: Path, recipe: Recipe, student: Decoder, adapted: Any, bf16: bool) -> Teacher | None:
    loss = recipe.loss
    if loss.distillation == 0:
        return None
    if loss.teacher is None and recipe.adapter is not None:
        # the student with its adapters disabled, that is, the start weights
        return Teacher(student, loss, student.vocab_size, adapted.disable_adapter)
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = load_decoder(loss.teacher or start, dtype, student.device)
    decoder.model.config._attn_implementation = packed_attention.register()
    return Teacher(Decoder(decoder.model), loss, student.vocab_size)


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has bfloat16 instructions. Without them a CPU computes bfloat16 slower than float32."""
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _save(start: Path, recipe: Recipe, training: Training, folder: Path) -> None:
    """Write the adapter or the checkpoint with its schedule into `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    trained: Any = training.model
    if recipe.adapter is not None:
        adapters.save_adapters(trained, start, folder)
    else:
        trained.config._attn_implementation = "sdpa"
        trained.to(torch.bfloat16 if recipe.bf16 else torch.float32).save_pretrained(folder, safe_serialization=True)
        load_tokenizer(start).save_pretrained(folder)
    layers = training.decoder.num_layers
    save_spec(recipe.spec, layers, folder, Trained.on(recipe.spec.build(layers), recipe.schedules.values()))


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
