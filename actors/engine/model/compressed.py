"""Reads checkpoints with 8-bit weights in the compressed-tensors format. Refuses other quantized weights.

A quantized layer stores 8-bit codes and a tensor `weight_scale`: one scale in all, one per output, or one per group of
an output's inputs. weight = (code - zero point) * scale. The codes are in `weight` (int8 or float8_e4m3fn) or in
`weight_packed` (an int32 holds four int8 codes, each plus 128). Asymmetric layers have a zero point for each scale, in
`weight_zero_point`. Layers without `weight_scale` are not quantized. Scales of activations and of the KV cache
(`input_scale`, `kv_cache_scheme`) are not read, because the engine computes its own.
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
CONFIG_KEYS = ("quantization_config", "compression_config")  # keys of config.json; old checkpoints use the second
METHOD, PACKED_FORMAT = "compressed-tensors", "pack-quantized"
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", PACKED_FORMAT)
STRATEGIES = ("tensor", "channel", "group")
TYPES: dict[str, Kind] = {"int": "int8", "float": "fp8"}  # type name in compressed-tensors -> kind
CODES: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3"}  # kind -> type name in safetensors
WEIGHT, PACKED, SCALE, ZERO_POINT = "weight", "weight_packed", "weight_scale", "weight_zero_point"  # a layer's tensors
CODES_IN_INT32 = 4
LIMIT = 127  # int8 codes of the engine are -127 ... 127
AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True)
class StoredWeights:
    """How a checkpoint stores 8-bit weights, according to its config.json."""

    kind: Kind  # type of the codes
    multiplied: bool  # whether the checkpoint is meant for 8-bit weights times 8-bit activations (W8A8)
    symmetric: bool = True  # whether all zero points are 0 or absent

    def run(self, dtype: str, *, on_gpu: bool) -> bool:
        """Return whether the engine should multiply with the 8-bit codes, if the CPU can, instead of expanding them."""
        return self.multiplied and dtype == "bfloat16" and not on_gpu and self.kind == "int8"


def stored_weights(config: Mapping[str, Any], folder: Path) -> StoredWeights | None:
    """Return how 8-bit weights are stored; None: not quantized. Raises UserError for unsupported quantization."""
    key = next((key for key in CONFIG_KEYS if config.get(key)), None)
    if key is None:
        return None
    try:
        found = _read(config[key], key)
    except (AttributeError, TypeError):
        found = f"{METHOD}, a scheme that cannot be read"
    if isinstance(found, str):
        raise UserError(
            f"{folder}: quantized weights ({found}) are not supported; give the bfloat16 checkpoint, or a "
            f"{METHOD} checkpoint with 8 bits and scales for tensors, outputs or groups"
        )
    return found


def _read(entry: Any, key: str) -> StoredWeights | str:
    """Read `entry`, `key` of config.json. Return the stored weights, or the name of what is unsupported."""
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
    """Read one of `config_groups` in config.json. Return the stored weights, or the name of what is unsupported."""
    weights, inputs, layout = group["weights"], group.get("input_activations"), group.get("format") or layout
    size, order = weights.get("group_size"), weights.get("actorder")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    bits, type_name = weights.get("num_bits", 8), weights.get("type", "int")
    for refused, what in (
        (bits != 8, f"{bits} bits"),
        (layout not in FORMATS, f"format {layout}"),
        (strategy not in STRATEGIES, f"strategy {strategy}"),
        # with these values of actorder, a group's inputs are not adjacent
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
    """Expand 8-bit codes to weights in place. Each weight is computed in float32 and rounded once.

    The library compressed-tensors also rounds to the type of the scales, which changes answers in float32.

    Args:
        model: Model whose parameters hold codes instead of weights. float32, bfloat16 and float16 hold codes exactly.
        folder: The checkpoint's folder.
        stored: The result of `stored_weights`.
        keep: Whether to keep scales for `scales_of`, in linear layers without groups and zero points. The codes must
            be int8.

    Returns:
        The names of weights with packed codes, which transformers reports as missing.

    Raises:
        UserError: A layer has no scales or no codes, scales of a wrong shape, or codes of a wrong kind.
    """
    import torch

    unpacked, expanded = set(), set()  # expanded: addresses of finished weights; head and embedding may share one
    with ExitStack() as stack:
        layers = _layers(folder, stored.kind, stack)
        modules = {layer: _module(model, layer, folder) for layer in layers}
        for layer, (name, module) in modules.items():
            parts, weight = layers[layer], module.weight.data
            scales, zeros = _grids(parts, weight, f"{folder}: weight_scale of {layer}")
            if stored.symmetric and zeros.any():
                raise UserError(
                    f"{folder}: weight_zero_point of {layer} is not zero, but config.json says symmetric; {AGAIN}"
                )
            if PACKED in parts:
                unpacked.add(f"{name}.weight")
            if weight.data_ptr() not in expanded:
                codes = weight.float()  # codes as stored, if they are not packed
                if PACKED in parts:
                    packed, (outputs, inputs) = parts[PACKED](), weight.shape
                    if list(packed.shape) != [outputs, -(-inputs // CODES_IN_INT32)]:
                        what = f"{folder}: weight_packed of {layer} has shape {list(packed.shape)}"
                        raise UserError(f"{what}, which does not fit the weight [{outputs}, {inputs}]; {AGAIN}")
                    codes = _unpacked(packed, inputs).to(weight.device)
                groups = codes.view(len(weight), scales.shape[1], -1)  # [O, G, I / G]
                weight.copy_(((groups - zeros[..., None]) * scales[..., None]).view(weight.shape))
                expanded.add(weight.data_ptr())
            if keep and type(module) is torch.nn.Linear and scales.shape[1] == 1 and not zeros.any():
                module.scales = scales.reshape(-1).expand(len(weight)).contiguous()
    return unpacked


Parts = dict[str, "Callable[[], Tensor]"]  # last part of a tensor's name -> function that reads the tensor


def _layers(folder: Path, kind: Kind, stack: ExitStack) -> dict[str, Parts]:
    """Return layer name -> functions that read the layer's tensors, for all layers with codes, sorted by name.

    stack: keeps the files open. Raises UserError if a layer has no codes or no scales, or codes of another kind.
    """
    from safetensors import safe_open

    found: dict[str, Parts] = {}
    kinds: dict[str, str] = {}  # layer -> safetensors type of its codes, for layers whose codes are not packed
    for name in weight_files(folder, names_in(folder)):
        file: Any = stack.enter_context(safe_open(folder / name, framework="pt"))
        for key in file.keys():  # noqa: SIM118
            layer, _, part = key.rpartition(".")
            if part == WEIGHT and (stored := str(file.get_slice(key).get_dtype())) in CODES.values():
                kinds[layer] = stored
            elif part not in (PACKED, SCALE, ZERO_POINT):
                continue
            found.setdefault(layer, {})[part] = partial(file.get_tensor, key)
    for layer, parts in sorted(found.items()):
        if kinds.get(layer, CODES[kind]) != CODES[kind]:
            raise UserError(f"{folder}: the weight of {layer} is {kinds[layer]}, but config.json says {kind}; {AGAIN}")
        if SCALE not in parts:
            raise UserError(f"{folder}: no weight_scale for the 8-bit weight of {layer}; {AGAIN}")
        if WEIGHT not in parts and PACKED not in parts:
            raise UserError(f"{folder}: {layer} has a weight_scale, but no 8-bit weight; {AGAIN}")
    return dict(sorted(found.items()))


def _grids(parts: Parts, weight: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Read a layer's scales and zero points, float32 [O or 1, G] each. what: name of the scales, for error messages."""
    import torch

    found, (outputs, inputs) = parts[SCALE](), weight.shape
    shape = (1, 1) if found.numel() == 1 else (len(found), found.numel() // max(len(found), 1))
    if shape[0] not in (1, outputs) or shape[1] == 0 or inputs % shape[1]:
        raise UserError(
            f"{what} has shape {list(found.shape)}, which does not fit the weight {list(weight.shape)}: there must be "
            "one scale in all, one per output, or one per group of an output's inputs"
        )
    scales = found.to(weight.device).float().view(shape)
    if ZERO_POINT not in parts:
        return scales, torch.zeros_like(scales)
    points = parts[ZERO_POINT]()
    if points.dtype is torch.int32 and list(points.shape) == [-(-outputs // CODES_IN_INT32), shape[1]]:
        points = _unpacked(points.T, outputs).T  # packed along the outputs
    if points.dtype is torch.int32 or points.numel() != scales.numel():
        raise UserError(
            f"{what} has shape {list(found.shape)}, which weight_zero_point of type {points.dtype} and shape "
            f"{list(points.shape)} does not fit; {AGAIN}"
        )
    return scales, points.to(weight.device).float().reshape(shape)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """Unpack int32 [rows, words], four codes per word. Return the first `count` codes of each row as float32."""
    import torch

    return packed.contiguous().view(torch.uint8)[:, :count].float() - 128


def _module(model: PreTrainedModel, layer: str, folder: Path) -> tuple[str, Any]:
    """Return full name and module of a linear layer or embedding. `layer` may lack the model's prefix."""
    import torch

    for name in (layer, f"{model.base_model_prefix}.{layer}"):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            return name, module
    raise UserError(f"{folder}: {layer} has a weight_scale, but is no linear layer or embedding of this model")


def scales_of(module: nn.Module) -> Tensor | None:
    """Return the scales (float32 [O]) of a linear layer's int8 codes, kept as attribute `scales`; None without codes.

    Rounding weight [O, I] / scales recovers the codes; 16-bit weights are exact enough for this.
    """
    scales: Tensor | None = getattr(module, "scales", None)
    return scales


def renew(module: nn.Module) -> None:
    """Recompute the scales of a layer with 8-bit codes after a change of its weight. Do nothing for other layers."""
    if scales_of(module) is not None:
        module.scales = largest_scales(module.weight)  # type: ignore[arg-type]


def largest_scales(weight: Tensor) -> Tensor:
    """Return scales (float32 [O]) for weight [O, I] such that each output's largest int8 code is `LIMIT`."""
    return weight.detach().float().abs().amax(dim=1) / LIMIT
