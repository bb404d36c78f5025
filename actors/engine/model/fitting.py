"""Checks that a checkpoint's tensors are the weights of the model that its config.json describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError, flat
from actors.engine.model.weights import StoredTensor, building_models

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
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

    def file(weight: str) -> str:
        """Return the name of the file that holds a weight. There, the weight's name may lack the model's prefix."""
        return next((one.file for key, one in tensors.items() if f".{weight}".endswith(f".{key}")), name)

    for weight, stored, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{file(weight)}: {weight} has shape {list(stored)}, but config.json needs {list(wanted)}: the files "
            "belong to two models; fetch the checkpoint again"
        )
    layers = model.config.num_hidden_layers
    for weight in sorted(report["unexpected_keys"]):
        if weight.endswith(CONSTANTS):
            continue
        layer = LAYER.search(weight)
        if layer is not None and int(layer[1]) >= layers:
            raise UserError(
                f"{file(weight)}: {weight} is of layer {layer[1]}, counted from 0, but config.json has "
                f"num_hidden_layers = {layers}, so this layer would be left out: fetch the checkpoint again"
            )
        if layer is not None or _has_module(model, weight.rpartition(".")[0]):
            shape = list(tensors[weight].shape) if weight in tensors else ""
            raise UserError(
                f"{file(weight)}: {weight} {shape} is no weight of a {model.config.model_type} model with this "
                "config.json, so it would be left out: fetch the checkpoint again"
            )
    if missing := report["missing_keys"]:  # transformers has filled these weights with random numbers
        raise UserError(f"{name}: no weights for {min(missing)}: fetch the checkpoint again")


def _has_module(model: PreTrainedModel, path: str) -> bool:
    return any(key in (path, f"{model.base_model_prefix}.{path}") for key, _ in model.named_modules() if key)
