"""Merges a speed adapter into the weights while vLLM loads them, before vLLM shards them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from actors.engine.errors import UserError
from actors.engine.model.speed_adapter import WEIGHTS, layers_in, read_adapter, update

LOAD_FORMAT = "skipdecode"
FORMATS = ("auto", "hf", "safetensors")  # load formats that the base weights may have
FOLDER, BASE_FORMAT = "speed_adapter", "base_format"  # keys of model_loader_extra_config


def use_adapter(load_config: Any, folder: str) -> None:
    """Change a LoadConfig so that `AdapterLoader` loads the model and merges the adapter in `folder`."""
    if load_config.load_format not in FORMATS:
        raise UserError(
            f"skipdecode: load_format {load_config.load_format} cannot be combined with speed_adapter: use "
            f"{' or '.join(FORMATS)}"
        )
    extra = {FOLDER: folder, BASE_FORMAT: load_config.load_format}
    load_config.model_loader_extra_config = {**load_config.model_loader_extra_config, **extra}
    load_config.load_format = LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class AdapterLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reads safetensors, and adds the speed adapter's updates to the weights."""

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self.adapter = read_adapter(Path(extra.pop(FOLDER)))
        base = dataclasses.replace(load_config, load_format=extra.pop(BASE_FORMAT), model_loader_extra_config=extra)
        super().__init__(base)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights. As in `merge`, sums are float32, and then rounded to the model's dtype."""
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
