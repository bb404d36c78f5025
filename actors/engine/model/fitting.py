"""Checks that a checkpoint's tensors are the weights of the model that its config.json describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError, flat
from actors.engine.model.weights import StoredTensor, building_models

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.")
CONSTANTS = (".masked_bias", "attn.bias", "attention.bias", ".inv_freq")  # tensors that old transformers versions saved


def check_tensors(config: PretrainedConfig, tensors: Mapping[str, StoredTensor], name: str) -> None:
    """Check that `tensors`, read from a checkpoint's headers, are the weights of the model that `config` describes.

    The model is built on the meta device, which takes no memory. name: the checkpoint's name, for error messages.

    Raises:
        UserError: `config` does not describe a model, or the tensors do not fit the model (see `check_report`).
    """
    import torch
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM
    with building_models:
        try:
            with torch.device("meta"):
                model_class: Any = type(library.from_config(config))
        except Exception as error:  # transformers may raise any exception for an unexpected value
            raise UserError(
                f"{name}: no model can be built from config.json: {type(error).__name__}: {flat(error)}"
            ) from None
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict={key: torch.empty(tensor.shape, device="meta") for key, tensor in tensors.items()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `report` lists the mismatches
            device_map={"": "meta"},
        )
    check_report(model, report, tensors, name)


def check_report(
    model: PreTrainedModel,
    report: Mapping[str, Any],  # transformers' loading info
    tensors: Mapping[str, StoredTensor],  # tensors in the checkpoint's files
    name: str,  # name of the checkpoint, for error messages
) -> None:
    """Raise UserError if `report` lists an unused tensor, a wrong shape, or a weight without a tensor."""
    reasons = {weight: f"{list(stored)}, not {list(wanted)}" for weight, stored, wanted in report["mismatched_keys"]}
    for weight in report["unexpected_keys"]:
        inside = LAYER.search(weight) or _has_module(model, weight.rpartition(".")[0])
        if inside and not weight.endswith(CONSTANTS):
            reasons[weight] = f"no weight of this {model.config.model_type} model"
    reasons |= dict.fromkeys(report["missing_keys"], "missing")  # transformers fills these with random numbers
    if reasons:
        weight = min(reasons)
        # in the file, the weight's name may lack the model's prefix
        file = next((one.file for key, one in tensors.items() if f".{weight}".endswith(f".{key}")), name)
        raise UserError(f"{file}: {weight} does not fit config.json ({reasons[weight]}): fetch the checkpoint again")


def _has_module(model: PreTrainedModel, path: str) -> bool:
    return any(key in (path, f"{model.base_model_prefix}.{path}") for key, _ in model.named_modules() if key)
