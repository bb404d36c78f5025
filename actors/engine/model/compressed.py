"""Reads checkpoints with 8-bit weights in the format of compressed-tensors, and refuses unsupported ones.

A quantized layer has codes and `weight_scale`: one scale in all, one per output, or one per group of an output's
inputs. weight = (code - zero point) * scale. The codes are in `weight` (int8 or float8_e4m3fn) or in `weight_packed`
(four int8, each plus 128, in an int32). Asymmetric layers have a `weight_zero_point` for each scale. Layers without
`weight_scale` are plain, such as those in the `ignore` list. The scales of activations and of the cache (`input_scale`,
`kv_cache_scheme`) are not read: the engine computes its own.
Shapes: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.engine.errors import UserError
from actors.engine.model.weights import names_in, weight_files

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

Kind = Literal["int8", "fp8"]
CONFIG_KEYS = ("quantization_config", "compression_config")  # keys of config.json; the second one is older
METHOD, PACKED_FORMAT = "compressed-tensors", "pack-quantized"
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", PACKED_FORMAT)
STRATEGIES = ("tensor", "channel", "group")
TYPES: dict[str, Kind] = {"int": "int8", "float": "fp8"}  # type names in the format
LIMITS: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}  # largest code that a weight is rounded to
CODES: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3"}  # type names in safetensors
WEIGHT, PACKED, SCALE, ZERO_POINT = "weight", "weight_packed", "weight_scale", "weight_zero_point"  # tensors of a layer
CODES_IN_INT32 = 4


@dataclass(frozen=True)
class StoredWeights:
    """How a checkpoint stores its 8-bit weights, according to its config."""

    kind: Kind  # type of the codes
    multiplied: bool  # whether the checkpoint is meant for products of 8-bit codes with 8-bit inputs
    symmetric: bool = True  # whether there are no zero points, or all are 0

    def run(self, dtype: str, *, on_gpu: bool) -> bool:
        """Return whether the engine multiplies by the codes if the CPU has the instructions. Else it expands them."""
        return self.multiplied and dtype == "bfloat16" and not on_gpu and self.kind == "int8"


@dataclass(frozen=True)
class Codes:
    """The scales of a layer's codes. The codes are weight [O, I] / scales; 16-bit weights are exact enough for that.

    scales: float32 [O].
    """

    kind: Kind
    scales: Tensor


def stored_weights(config: Mapping[str, Any], folder: Path) -> StoredWeights | None:
    """Return how weights are stored; None for plain weights. Raises UserError that names an unsupported scheme."""
    key = next((key for key in CONFIG_KEYS if config.get(key)), None)
    if key is None:
        return None
    try:
        found = _read(config[key], key)
    except (AttributeError, TypeError):
        found = f"{METHOD}, a scheme that cannot be read"
    if isinstance(found, str):
        raise UserError(
            f"{folder}: quantized weights ({found}) are not supported; give the bfloat16 checkpoint, or one of "
            f"{METHOD} with 8 bits and scales for tensors, outputs or groups"
        )
    return found


def _read(entry: Any, key: str) -> StoredWeights | str:
    """Read a quantization entry of config.json; return the name of an unsupported method or value instead."""
    if not isinstance(entry, dict):
        return key
    method = entry.get("quant_method", METHOD if "config_groups" in entry else key)
    if method != METHOD:
        return str(method)
    if entry.get("transform_config"):
        return f"{METHOD}, transform_config"
    if (entry.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return f"{METHOD}, sparsity_config"
    found = {_scheme(group, entry.get("format")) for group in (entry.get("config_groups") or {}).values()}
    if len(found) != 1:
        return f"{METHOD}, {'several schemes' if found else 'no config_groups'}"
    return found.pop()


def _scheme(group: Mapping[str, Any], layout: Any) -> StoredWeights | str:
    """Read one config group of the entry; return the name of an unsupported value instead."""
    weights, inputs, layout = group["weights"], group.get("input_activations"), group.get("format") or layout
    size, order = weights.get("group_size"), weights.get("actorder")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    bits, type_name = weights.get("num_bits", 8), weights.get("type", "int")
    for refused, what in (
        (bits != 8, f"{bits} bits"),
        (layout not in FORMATS, f"format {layout}"),
        (strategy not in STRATEGIES, f"strategy {strategy}"),
        # the inputs of a group are not adjacent
        (order is True or str(order).lower() in ("group", "dynamic"), f"actorder {order}"),
        (
            type_name not in TYPES or (layout == PACKED_FORMAT and type_name != "int"),
            f"type {type_name} in format {layout}",
        ),
    ):
        if refused:
            return f"{METHOD}, {what}"
    inputs_too = isinstance(inputs, dict) and inputs.get("num_bits", 8) == 8
    symmetric = weights.get("symmetric", True) is True
    return StoredWeights(TYPES[type_name], inputs_too and symmetric and strategy != "group", symmetric)


def expand(model: PreTrainedModel, folder: Path, stored: StoredWeights, *, keep: bool) -> set[str]:
    """Expand codes to weights in place. Each weight is computed in float32 and rounded once.

    compressed-tensors would round to the type of the scales, which changes answers in float32.

    Args:
        model: Loaded with codes in place of weights; codes are exact in float32, bfloat16 and float16.
        folder: The checkpoint's folder.
        stored: What `stored_weights` returned.
        keep: Whether linear layers without groups and zero points keep their scales, see `codes_of`.

    Returns:
        The names of weights with packed codes, which transformers reports as missing.

    Raises:
        UserError: Scales are missing or have a wrong shape, scales are without codes, or codes are of another kind.
    """
    import torch

    unpacked, expanded = set(), set()  # expanded: addresses, as head and embedding may share a weight
    with ExitStack() as opened:
        layers = _layers(folder, stored.kind, opened)
        modules = {layer: _module(model, layer, folder) for layer in layers}
        for layer, (name, module) in modules.items():
            parts, weight = layers[layer], module.weight.data
            scales, zeros = _grids(parts, weight, f"{folder}: weight_scale of {layer}")
            if stored.symmetric and zeros.any():
                raise UserError(f"{folder}: weight_zero_point of {layer} is not zero, and config.json says symmetric")
            if PACKED in parts:
                unpacked.add(f"{name}.weight")
            if weight.data_ptr() not in expanded:
                codes = weight.float()  # codes that are not packed
                if PACKED in parts:
                    packed, (outputs, inputs) = parts[PACKED](), weight.shape
                    if list(packed.shape) != [outputs, -(-inputs // CODES_IN_INT32)]:
                        what = f"{folder}: weight_packed of {layer} has shape {list(packed.shape)}"
                        raise UserError(f"{what}, and its weight [{outputs}, {inputs}]")
                    codes = _unpacked(packed, inputs).to(weight.device)
                groups = codes.view(len(weight), scales.shape[1], -1)  # [O, G, I / G]
                weight.copy_(((groups - zeros[..., None]) * scales[..., None]).view(weight.shape))
                expanded.add(weight.data_ptr())
            if keep and type(module) is torch.nn.Linear and scales.shape[1] == 1 and not zeros.any():
                set_codes(module, Codes(stored.kind, scales.reshape(-1).expand(len(weight)).contiguous()))
    return unpacked


Parts = dict[str, "Callable[[], Tensor]"]  # last part of a tensor's name -> function that reads it


def _layers(folder: Path, kind: Kind, opened: ExitStack) -> dict[str, Parts]:
    """Return, for each layer with codes, functions that read its tensors; layers are sorted. `opened` closes the files.

    Raises UserError if a layer lacks codes or scales, or its codes are of another kind.
    """
    from safetensors import safe_open

    found: dict[str, Parts] = {}
    kinds: dict[str, str] = {}  # layer -> type of its quantized weights, for layers that do not store them packed
    for name in weight_files(folder, names_in(folder)):
        file: Any = opened.enter_context(safe_open(folder / name, framework="pt"))
        for key in file.keys():  # noqa: SIM118
            layer, _, part = key.rpartition(".")
            if part == WEIGHT and (stored := str(file.get_slice(key).get_dtype())) in CODES.values():
                kinds[layer] = stored
            elif part not in (PACKED, SCALE, ZERO_POINT):
                continue
            found.setdefault(layer, {})[part] = partial(file.get_tensor, key)
    for layer, parts in sorted(found.items()):
        if kinds.get(layer, CODES[kind]) != CODES[kind]:
            raise UserError(f"{folder}: the weight of {layer} is {kinds[layer]}, and config.json says {kind}")
        if SCALE not in parts:
            raise UserError(f"{folder}: no weight_scale for the 8 bits of {layer}")
        if WEIGHT not in parts and PACKED not in parts:
            raise UserError(f"{folder}: weight_scale of {layer}, whose weight does not have 8 bits")
    return dict(sorted(found.items()))


def _grids(parts: Parts, weight: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points of a layer's codes, float32 [O or 1, G]."""
    import torch

    found, (outputs, inputs) = parts[SCALE](), weight.shape
    shape = (1, 1) if found.numel() == 1 else (len(found), found.numel() // len(found))
    if shape[0] not in (1, outputs) or shape[1] == 0 or inputs % shape[1]:
        raise UserError(
            f"{what} has shape {list(found.shape)}, and its weight {list(weight.shape)}: there must be one "
            "scale in all, one per output, or one per group of an output's inputs"
        )
    scales = found.to(weight.device).float().view(shape)
    if ZERO_POINT not in parts:
        return scales, torch.zeros_like(scales)
    points = parts[ZERO_POINT]()
    if points.dtype is torch.int32:  # packed along the outputs
        points = _unpacked(points.T, outputs).T
    if points.numel() != scales.numel():
        raise UserError(f"{what} has shape {list(found.shape)}, and weight_zero_point {list(points.shape)}")
    return scales, points.to(weight.device).float().reshape(shape)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """Return `count` codes of each row, float32 [rows, count]; packed: int32 [rows, words]."""
    import torch

    return packed.contiguous().view(torch.uint8)[:, :count].float() - 128


def _module(model: PreTrainedModel, layer: str, folder: Path) -> tuple[str, Any]:
    """Return name and module of the linear layer or embedding `layer`, whose name may lack the model's prefix."""
    import torch

    for name in (layer, f"{model.base_model_prefix}.{layer}"):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            return name, module
    raise UserError(f"{folder}: weight_scale of {layer}, which is no linear layer and no embedding of this model")


def codes_of(module: nn.Module) -> Codes | None:
    """Return the scales of a linear layer's codes, if the checkpoint has them and the engine multiplies such codes."""
    codes: Codes | None = getattr(module, "codes", None)
    return codes


def set_codes(module: nn.Module, codes: Codes) -> None:
    """Store codes for `codes_of`."""
    module.codes = codes  # type: ignore[assignment]


def renew(module: nn.Module) -> None:
    """Compute the scales anew after the weight of a layer with codes has changed."""
    import torch

    codes = codes_of(module)
    if codes is not None:
        assert isinstance(module.weight, torch.Tensor)
        set_codes(module, Codes(codes.kind, largest_scales(module.weight, codes.kind)))


def largest_scales(weight: Tensor, kind: Kind) -> Tensor:
    """Return a scale per output of weight [O, I], float32 [O], with which the largest code is the kind's limit."""
    return weight.detach().float().abs().amax(dim=1) / LIMITS[kind]
