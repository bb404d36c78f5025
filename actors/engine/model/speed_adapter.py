"""Speed adapters: low-rank weights for speeds above 1x, added to a frozen base model while the model is loaded.

An adapter is a folder in peft's format (LoRA, Hu et al. 2021, arXiv 2106.09685) with ``adapter_config.json`` and
``adapter_model.safetensors``. It has two further files: ``skipdecode.json`` holds the schedule, ``speed_adapter.json``
the digests of the base's and the adapter's weights. At full depth the base runs as published, without the adapter.
Shapes: I inputs and O outputs of a linear layer, R the adapter's rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engine.errors import UserError
from actors.engine.model.file_digests import digests, file_digest, read_object, weights_digest
from actors.engine.model.weights import building_models, names_in, weight_files
from actors.engine.schedule.file import SCHEDULE_FILE

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "speed_adapter.json"
FILES = (CONFIG, WEIGHTS, RECORD, SCHEDULE_FILE)
PREFIX = "base_model.model."  # prefix of all tensor names, before the path of the layer
PARTS = ("lora_A", "lora_B")
# keys of adapter_config.json with a value, as `skipdecode adapt` writes them; ANY: the value varies
ANY = object()
WRITTEN: dict[str, Any] = {
    **dict.fromkeys(("base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout"), ANY),
    **dict.fromkeys(("peft_version", "r", "target_modules"), ANY),
    **{"init_lora_weights": True, "megatron_core": "megatron.core", "peft_type": "LORA", "qalora_group_size": 16},
    "task_type": "CAUSAL_LM",
}
OFF: tuple[Any, ...] = (None, False, "none", {}, [])  # values of all other keys, which turn peft's features off


@dataclass(frozen=True)
class SpeedAdapter:
    """A speed adapter whose folder is checked, but whose weights are not loaded."""

    path: Path  # folder of the adapter
    base: str  # digest of the base weights for which the adapter was trained, see `weights_digest`
    rank: int  # rank of the products B A
    scale: float  # factor for all products B A

    def check_base(self, digest: str, name: str) -> None:
        """Raise UserError if the adapter has another base. digest: the digest of the weights of the model `name`."""
        if digest != self.base:
            raise UserError(
                f"{self.path}: trained for a base with weights {self.base[:16]}, but {name} has {digest[:16]}: give "
                "the adapter's base as model.path, or train a new adapter (skipdecode adapt)"
            )


def read_adapter(path: Path) -> SpeedAdapter:
    """Read the speed adapter in a folder. Check everything except the shapes of its weights.

    Raises UserError if the folder is not a speed adapter, is damaged, or uses other peft features than plain LoRA.
    """
    for name in FILES:
        if not (path / name).is_file():
            raise UserError(f"{path}: not a speed adapter: no {name}; `skipdecode adapt` creates an adapter")
    record, settings = read_object(path / RECORD), read_object(path / CONFIG)
    if record.keys() != {"base", "weights"}:
        raise UserError(f"{path / RECORD}: holds {', '.join(sorted(record)) or 'nothing'} instead of base and weights")
    if file_digest(path / WEIGHTS, "sha256") != record["weights"]:
        raise UserError(f"{path / WEIGHTS}: damaged: its SHA-256 is not the one in {RECORD}; fetch it again")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    for key, value in settings.items():
        if value != WRITTEN.get(key) and WRITTEN.get(key) is not ANY and value not in OFF:
            raise UserError(
                f"{path / CONFIG}: {key} = {str(value)[:60]!r} is not what `skipdecode adapt` writes: adapters made "
                "elsewhere are not supported"
            )
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(f"{path / CONFIG}: r = {rank} must be an integer >= 1, and lora_alpha = {alpha} a number")
    return SpeedAdapter(path, str(record["base"]), rank, alpha / rank)


def base_digest(checkpoint: Path) -> str:
    """Return the digest of the weights in a checkpoint folder. An adapter records this digest of its base."""
    found = digests(checkpoint)
    return weights_digest({name: found[name] for name in weight_files(checkpoint, names_in(checkpoint))})


def save_record(folder: Path, base: str) -> None:
    """Write ``speed_adapter.json`` into a folder that holds an adapter's weights. base: see `SpeedAdapter`."""
    record = {"base": base, "weights": file_digest(folder / WEIGHTS, "sha256")}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def linear_layers(config: PretrainedConfig) -> dict[str, nn.Module]:
    """Return path -> linear layer for all linear layers in a model's decoder layers, without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    from actors.engine.model.families import family_of

    with building_models, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = family_of(config).layers(model)
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    return {
        f"{prefix}.{name}": module
        for name, module in blocks.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }


def merge(model: PreTrainedModel, adapter: SpeedAdapter) -> None:
    """Merge an adapter into a model in place. Each weight W becomes W + scale · B A, computed in fp32, then rounded."""
    from safetensors import safe_open
    from transformers.pytorch_utils import Conv1D

    with safe_open(adapter.path / WEIGHTS, framework="pt") as file:
        for layer in layers_in(file.keys()):
            module = model.get_submodule(layer)
            weight: Any = module.weight
            change = update(file, layer, adapter.scale, weight.device)
            if isinstance(module, Conv1D):  # the weight of Conv1D is [I, O]
                change = change.T
            weight.data.copy_(weight.data.float() + change)


def update(file: Any, layer: str, scale: float, device: torch.device) -> torch.Tensor:
    """Return the adapter's change of the weight of `layer`: scale · B A, fp32 [O, I]. file: open safetensors file."""
    down, up = (file.get_tensor(f"{PREFIX}{layer}.{part}.weight").to(device).float() for part in PARTS)
    product: torch.Tensor = (up @ down) * scale  # [O, R] times [R, I]
    return product


def check_shapes(adapter: SpeedAdapter, config: PretrainedConfig) -> None:
    """Raise UserError if an adapter tensor has a wrong shape, or does not belong to a linear layer of the model."""
    path, rank = adapter.path / WEIGHTS, adapter.rank
    from safetensors import SafetensorError, safe_open
    from transformers.pytorch_utils import Conv1D

    linear = linear_layers(config)
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path}: damaged: {error}; fetch it again") from None
    layers = layers_in(shapes)
    if not layers:
        raise UserError(f"{path}: holds no adapter: fetch it again")
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        if layer not in linear:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise UserError(f"{path}: the model has no linear layer {layer} in its decoder layers; it has {known}")
        weight: Any = linear[layer].weight
        outputs, inputs = reversed(weight.shape) if isinstance(linear[layer], Conv1D) else weight.shape
        wanted |= {f"{PREFIX}{layer}.lora_A.weight": (rank, inputs), f"{PREFIX}{layer}.lora_B.weight": (outputs, rank)}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise UserError(f"{path}: {name}: shape {shapes.get(name, 'missing')}, must be {wanted.get(name, 'none')}")


def layers_in(names: Any) -> list[str]:
    """Return the sorted paths of the layers that an adapter changes. names: names of the adapter's tensors."""
    return sorted({name.removeprefix(PREFIX).rpartition(".weight")[0].rpartition(".")[0] for name in names})
