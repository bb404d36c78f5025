"""Speed adapters with random weights, made by peft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.engine.model.speed_adapter import base_digest, linear_layers, save_record
from actors.engine.schedule.file import Trained, save_spec
from actors.engine.schedule.schedule import PROMPT_POLICIES, ScheduleSpec


def with_random_adapters(
    model: PreTrainedModel, rank: int = 3, targets: Sequence[str] = (), **options: Any
) -> peft.PeftModel:
    """The model with random adapters at the targets; default every linear layer of the decoder layers."""
    names = {name.rpartition(".")[2] for name in linear_layers(model.config)}
    settings = peft.LoraConfig(
        r=rank, lora_alpha=5, target_modules=sorted(targets or names), task_type="CAUSAL_LM", **options
    )
    adapted: Any = peft.get_peft_model(model, settings)
    torch.manual_seed(5)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, 0.0, 0.3)
    return adapted  # type: ignore[no-any-return]


def random_adapter(base: Path, folder: Path, spec: ScheduleSpec, **options: Any) -> Path:
    """A speed adapter for the checkpoint `base`, in `folder`; spec: its schedule."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with_random_adapters(model, **options).save_pretrained(folder)
    stored = spec.build(model.config.num_hidden_layers)
    save_spec(spec, stored.num_layers, folder, Trained((1,), PROMPT_POLICIES, stored.keep_order, stored.warmup))
    save_record(folder, base_digest(base))
    return folder
