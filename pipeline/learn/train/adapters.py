"""Checks, adds and saves speed adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) with the library peft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.engine.errors import UserError
from actors.engine.model.loading import Checkpoint, with_adapter
from actors.engine.model.speed_adapter import CONFIG, WEIGHTS, base_digest, linear_layers, save_record
from pipeline.config.adapt import RANK, AdapterConfig

if TYPE_CHECKING:
    from peft import PeftModel


def check_targets(adapter: AdapterConfig, config: PretrainedConfig) -> None:
    """Raise UserError if `adapter.targets` names a layer that a model with `config` lacks. No weights are loaded."""
    known = _linear_names(config)
    for target in adapter.targets or ():
        if target not in known:
            raise UserError(f"adapter.targets: the model has no layer {target!r}; it has {', '.join(known)}")


def adapter_parameters(adapter: AdapterConfig, config: PretrainedConfig) -> int:
    """Return the number of parameters of a new adapter for a model with `config`. No weights are loaded."""
    layers: list[Any] = [
        layer
        for name, layer in linear_layers(config).items()
        if adapter.targets is None or name.rpartition(".")[2] in adapter.targets
    ]
    return (adapter.rank or RANK) * sum(sum(layer.weight.shape) for layer in layers)


def started(base: Checkpoint, folder: str) -> Checkpoint:
    """Return `base` with the adapter in `folder`. Raises UserError if the adapter belongs to another checkpoint."""
    try:
        found = with_adapter(base, folder)
        assert found.adapter is not None
        found.adapter.check_base(base_digest(base.path), str(base.path))
    except UserError as error:
        raise UserError(f"adapter.start: {error}") from None
    return found


def add_adapters(model: PreTrainedModel, adapter: AdapterConfig) -> PeftModel:
    """Freeze the model and add trainable adapters: new ones at `adapter.targets`, or those in `adapter.start`."""
    import peft

    if adapter.start is not None:
        options = peft.PeftConfig.from_pretrained(adapter.start)
        assert isinstance(options, peft.LoraConfig)
        options.lora_dropout = adapter.dropout
        return peft.PeftModel.from_pretrained(model, adapter.start, config=options, is_trainable=True)
    rank = adapter.rank or RANK
    options = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if adapter.alpha is None else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets or _linear_names(model.config),
        task_type="CAUSAL_LM",
    )
    adapted: Any = peft.get_peft_model(model, options)
    return adapted  # type: ignore[no-any-return]


def round_frozen(model: torch.nn.Module) -> None:
    """Round the weights of frozen linear layers to bfloat16. Otherwise autocast would round them at every use.

    A head that shares the weights of the embeddings gets its own copy. Embeddings and norms keep their type, but are
    copied out of the mapped checkpoint file. Otherwise the whole file would stay in memory.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad:
            module.weight = torch.nn.Parameter(module.weight.detach().to(torch.bfloat16), requires_grad=False)
    for weight in model.parameters():
        if not weight.requires_grad and weight.dtype != torch.bfloat16:
            weight.data = weight.data.clone()


def save_adapters(model: PeftModel, base: Path, folder: Path) -> None:
    """Write the adapters, rounded to bfloat16, and a digest of the checkpoint folder `base` into `folder`."""
    import peft

    state: dict[str, Any] = peft.get_peft_model_state_dict(model)
    model.save_pretrained(str(folder), state_dict={name: weight.to(torch.bfloat16) for name, weight in state.items()})
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty template
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors lets only the owner read it
    save_record(folder, base_digest(base))


def _linear_names(config: PretrainedConfig) -> list[str]:
    """Return the sorted names of the linear modules in a decoder layer, such as `q_proj`."""
    return sorted({name.rpartition(".")[2] for name in linear_layers(config)})
