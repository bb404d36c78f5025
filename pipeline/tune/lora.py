"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) by the peft library: checked, added, merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actors.engine.errors import UserError
from pipeline.config.tune import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel


def check_targets(lora: LoraConfig, config: PretrainedConfig) -> None:
    """Raise UserError if a target is no linear layer of a model with this config; loads no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    known = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not model.get_output_embeddings()
    }
    for target in lora.targets:
        if target not in known:
            raise UserError(f"lora.targets: the model has no {target!r}; it has {', '.join(sorted(known))}")


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    """The model with frozen weights, and trainable adapters at the targets."""
    import peft

    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    adapted: Any = peft.get_peft_model(model, options)
    return adapted  # type: ignore[no-any-return]


def merged(model: PeftModel) -> PreTrainedModel:
    """Add the adapters' products to the base model's weights, in place, and return that model without the adapters.

    Do not use `model` afterwards.
    """
    plain: Any = model.merge_and_unload()
    return plain  # type: ignore[no-any-return]
