"""Loads a model for a schedule: leaves out layers that no token runs, and merges a speed adapter.

Both happen before vLLM reads and shards the weights. A layer is left out in the way in which vLLM leaves out the layers
of other pipeline stages. The rest is a shallower model, which vLLM compiles and runs as any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module, ModuleList
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.interfaces import supports_pp
from vllm.model_executor.models.utils import PPMissingLayer, _model_to_pp_missing_layer_names

from actors.engine.errors import UserError
from actors.engine.model.speed_adapter import WEIGHTS, layers_in, read_adapter, update
from actors.vllm.layers import layer_arguments

LOAD_FORMAT = "skipdecode"
FORMATS = ("auto", "hf", "safetensors", "dummy")  # load formats that the base weights may have
FOLDER, DROPPED, BASE_FORMAT = "speed_adapter", "dropped_layers", "base_format"  # keys of model_loader_extra_config
FULL_DEPTH = "run this model without SkipDecode (speedup: 1)"


def use_loader(load_config: Any, adapter: str | None, dropped: Collection[int]) -> None:
    """Change a LoadConfig so that `SkipLoader` loads the model, drops layers, and merges the adapter in a folder."""
    if load_config.load_format not in FORMATS:
        raise UserError(
            f"skipdecode: load_format {load_config.load_format} cannot be combined with a speed_adapter or dropped "
            f"layers: use {' or '.join(FORMATS)}"
        )
    extra = {FOLDER: adapter, DROPPED: sorted(dropped), BASE_FORMAT: load_config.load_format}
    load_config.model_loader_extra_config = {**load_config.model_loader_extra_config, **extra}
    load_config.load_format = LOAD_FORMAT


class DroppedLayer(PPMissingLayer):  # type: ignore[misc]
    """Stands for decoder layer `index`, which no token runs. Has no weights, and returns its input."""

    def __init__(self, index: int, layer: Module) -> None:
        super().__init__()
        self.arguments = layer_arguments(index, layer.forward)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the hidden states; together with the residual if the family's layers return both."""
        values = dict(zip(self.arguments, args, strict=False)) | options
        hidden = values["hidden_states"]
        return (hidden, values["residual"]) if "residual" in self.arguments else hidden


def drop_layers(model: Module, layers: ModuleList, dropped: Collection[int], compilation_config: Any) -> None:
    """Replace decoder layers by `DroppedLayer`, and remove their modules from vLLM's registries.

    vLLM allocates KV cache for the attention layers in `static_forward_context`.
    """
    if not supports_pp(model):
        raise UserError(
            f"skipdecode: {type(model).__name__} does not support pipeline parallelism in vLLM, so it cannot leave out "
            f"layers; {FULL_DEPTH}"
        )
    gone = [layers[index] for index in dropped]
    for index in dropped:
        layers[index] = DroppedLayer(index, layers[index])
    _unregister(compilation_config.static_forward_context, gone)
    registered = compilation_config.static_forward_context
    moe = compilation_config.static_all_moe_layers
    moe[:] = [name for name in moe if name in registered]
    kept = {id(weight) for weight in model.parameters()}
    for weight in (weight for layer in gone for weight in layer.parameters() if id(weight) not in kept):
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)  # models keep lists of their experts


def _unregister(registered: MutableMapping[str, Any], gone: Collection[Module]) -> None:
    """Remove the modules in `gone` from a dict. Raises UserError if another layer reads their keys and values."""
    inside = {id(module) for layer in gone for module in layer.modules()}
    names = {name for name, layer in registered.items() if id(layer) in inside}
    for name in names:
        del registered[name]
    for name, layer in registered.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target in names:
            raise UserError(
                f"skipdecode: {name} reads the keys and values of {target}, which the schedule drops; {FULL_DEPTH}"
            )


@register_model_loader(LOAD_FORMAT)
class SkipLoader(DefaultModelLoader):  # type: ignore[misc]
    """Drops layers, reads safetensors, and adds the speed adapter's updates to the weights."""

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        folder, self.dropped = extra.pop(FOLDER), extra.pop(DROPPED)
        self.adapter = None if folder is None else read_adapter(Path(folder))
        base = dataclasses.replace(load_config, load_format=extra.pop(BASE_FORMAT), model_loader_extra_config=extra)
        self.dummy = DummyModelLoader(base) if base.load_format == "dummy" else None
        super().__init__(base if self.dummy is None else dataclasses.replace(base, load_format="auto"))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Module:
        """Load the model. A draft model for speculative decoding keeps all its layers, and gets no adapter."""
        if model_config is getattr(vllm_config.speculative_config, "draft_model_config", None):
            self.adapter, self.dropped = None, []
        self._compilation_config = vllm_config.compilation_config
        model: Module = super().load_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: Module, model_config: Any) -> None:
        """Drop layers, and then load the weights of the others."""
        if self.dropped:
            layers = decoder_layers(model, model_config.get_total_num_hidden_layers())
            drop_layers(model, layers, self.dropped, self._compilation_config)
        # vLLM caches the names of missing layers by the id of a model, which a later model can have too
        _model_to_pp_missing_layer_names.clear()
        load = super().load_weights if self.dummy is None else self.dummy.load_weights
        load(model, model_config)
        _model_to_pp_missing_layer_names.clear()

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights. As in `merge`, sums are float32, and then rounded to the model's dtype."""
        if self.adapter is None:
            yield from super().get_all_weights(model_config, model)
            return
        path, dtype = self.adapter.path / WEIGHTS, model_config.dtype
        with safe_open(path, framework="pt") as file:
            left = set(layers_in(file.keys()))
            for name, weight in super().get_all_weights(model_config, model):
                if (layer := name.removesuffix(".weight")) in left:
                    left.remove(layer)
                    change = update(file, layer, self.adapter.scale, weight.device)
                    if change.shape != weight.shape:
                        raise UserError(
                            f"{path}: the adapter of {layer} has the shape {tuple(change.shape)}, not "
                            f"{tuple(weight.shape)} as in the checkpoint: use the adapter's base"
                        )
                    weight = (weight.to(dtype).float() + change).to(dtype)
                yield name, weight
        if left:
            raise UserError(f"{path}: the checkpoint has no weight of {min(left)}: use the adapter's base model")


def decoder_layers(model: Module, count: int) -> ModuleList:
    """Return the decoder layers of a model: the only list in it that has `count` modules."""
    found = [module for module in model.modules() if isinstance(module, ModuleList) and len(module) == count]
    if len(found) != 1:
        raise UserError(
            f"skipdecode: {type(model).__name__} has {len(found)} lists of {count} modules, not one, so its decoder "
            f"layers are unknown; {FULL_DEPTH}"
        )
    return found[0]
