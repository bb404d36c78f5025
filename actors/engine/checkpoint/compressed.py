"""Checkpoints whose weights have 8 bits, in the format of compressed-tensors: which of them run, and how they are read.

A quantized layer has `weight`, codes of int8 or float8_e4m3fn, and `weight_scale`, one number or one for each output:
weight = code * scale. Layers without `weight_scale` are plain, such as those of the `ignore` list. The scales of
activations and of the cache (`input_scale`, `kv_cache_scheme`) are not read: the engine computes its own.
Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.engine.checkpoint.weights import names_in, weight_files
from actors.engine.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

Kind = Literal["int8", "fp8"]
CONFIG_KEYS = ("quantization_config", "compression_config")  # of config.json; the second one is older
METHOD, FORMATS = "compressed-tensors", ("int-quantized", "float-quantized", "naive-quantized")
TYPES: dict[str, Kind] = {"int": "int8", "float": "fp8"}  # as the format names them
LIMITS: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}  # of the codes that a weight is rounded to
CODES: dict[Kind, str] = {"int8": "I8", "fp8": "F8_E4M3"}  # as safetensors names the types


@dataclass(frozen=True)
class StoredWeights:
    """What a checkpoint's config says of its weights.

    Args:
        kind: of their codes.
        inputs_too: whether the checkpoint is made for products whose inputs have 8 bits too.
    """

    kind: Kind
    inputs_too: bool

    def run(self, dtype: str, *, compiled: bool, on_gpu: bool, paged: bool) -> bool:
        """Whether an engine multiplies such codes, if the device has the instructions; else it expands them."""
        return self.inputs_too and dtype == "bfloat16" and not compiled and (paged if on_gpu else self.kind == "int8")


@dataclass(frozen=True)
class Codes:
    """The scales of a layer's codes: weight [O, I] / scales are the codes, which 16 bits of the weight determine.

    scales: float32 [O].
    """

    kind: Kind
    scales: Tensor


def stored_weights(config: Mapping[str, Any], folder: Path) -> StoredWeights | None:
    """What config.json says; None: plain weights. UserError that names what cannot be run."""
    for key in CONFIG_KEYS:
        if config.get(key):
            try:
                return _read(config[key], key)
            except _Unsupported as error:
                reason = str(error)
            except (AttributeError, TypeError):
                reason = f"{METHOD}, a scheme that cannot be read"
            raise UserError(
                f"{folder}: quantized weights ({reason}) are not supported; give the bfloat16 checkpoint, or one of "
                f"{METHOD} with 8 bits and a symmetric scale for each tensor or output"
            )
    return None


class _Unsupported(Exception):
    """What of a config is not run."""


def _read(entry: Any, key: str) -> StoredWeights:
    if not isinstance(entry, dict):
        raise _Unsupported(key)
    method = entry.get("quant_method", METHOD if "config_groups" in entry else key)
    if method != METHOD:
        raise _Unsupported(method)
    sparsity = entry.get("sparsity_config") or {}
    if entry.get("transform_config") or sparsity.get("format", "dense") != "dense":
        raise _Unsupported(f"{METHOD}, {'transform' if entry.get('transform_config') else 'sparsity'}_config")
    groups = entry.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _Unsupported(f"{METHOD}, a group of layers without a scheme of weights")
        inputs = group.get("input_activations")
        kind = _kind(weights, group.get("format") or entry.get("format"))
        found.add(StoredWeights(kind, isinstance(inputs, dict) and inputs.get("num_bits", 8) == 8))
    if len(found) != 1:
        raise _Unsupported(f"{METHOD}, {'several schemes' if found else 'no config_groups'}")
    return found.pop()


def _kind(weights: Mapping[str, Any], form: Any) -> Kind:
    """The codes of a scheme of weights."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    bits = weights.get("num_bits", 8)
    if bits != 8:
        raise _Unsupported(f"{METHOD}, {bits} bits")
    if form not in FORMATS:
        raise _Unsupported(f"{METHOD}, format {form}")
    if weights.get("symmetric", True) is not True:
        raise _Unsupported(f"{METHOD}, asymmetric")
    if strategy not in ("tensor", "channel"):
        raise _Unsupported(f"{METHOD}, strategy {strategy}")
    if weights.get("type", "int") not in TYPES:
        raise _Unsupported(f"{METHOD}, type {weights['type']}")
    return TYPES[weights.get("type", "int")]


def expand(model: PreTrainedModel, folder: Path, kind: Kind, *, keep: bool) -> None:
    """Multiply the codes that the library has loaded as weights by their scales, in place.

    Codes are exact in float32, bfloat16 and float16.

    Args:
        model: loaded from the folder, as if its codes were weights.
        folder: of the checkpoint.
        kind: of its codes.
        keep: whether linear layers keep their scales, see `codes_of`.

    Raises:
        UserError: scales that are missing, have no codes or another shape than their layer needs, or codes of another
            kind.
    """
    import torch

    scales, coded = _scales(folder)
    for layer, found_kind in sorted(coded.items()):
        if found_kind != CODES[kind]:
            raise UserError(f"{folder}: the weight of {layer} is {found_kind}, and config.json says {kind}")
        if layer not in scales:
            raise UserError(f"{folder}: no weight_scale for the 8 bits of {layer}")
    for layer in sorted(scales.keys() - coded.keys()):
        raise UserError(f"{folder}: weight_scale of {layer}, whose weight does not have 8 bits")
    modules = {layer: _module(model, layer, folder) for layer in scales}
    expanded = set()  # addresses: head and embedding may share a weight
    for layer, module in modules.items():
        weight: torch.Tensor = module.weight.data
        found = scales[layer].to(weight.device).float()
        if found.numel() not in (1, len(weight)):
            shapes = f"{list(found.shape)}, and its weight {list(weight.shape)}"
            raise UserError(f"{folder}: weight_scale of {layer} has shape {shapes}: not one scale, nor one an output")
        found = found.reshape(-1).expand(len(weight)).contiguous()
        if weight.data_ptr() not in expanded:
            weight.copy_(weight.float() * found[:, None])
        expanded.add(weight.data_ptr())
        if keep and type(module) is torch.nn.Linear:
            set_codes(module, Codes(kind, found))


def _scales(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The scales of a checkpoint folder by layer, and the types of weights that are codes."""
    from safetensors import safe_open

    scales: dict[str, Tensor] = {}
    coded: dict[str, str] = {}
    for name in weight_files(folder, names_in(folder)):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                layer, _, part = key.rpartition(".")
                if part == "weight":
                    kind = file.get_slice(key).get_dtype()
                    if kind in CODES.values():
                        coded[layer] = kind
                elif part == "weight_scale":
                    scales[layer] = file.get_tensor(key)
                elif part == "weight_zero_point" and file.get_tensor(key).any():
                    raise UserError(f"{folder}: {key} is not zero: asymmetric weights are not supported")
    return scales, coded


def _module(model: PreTrainedModel, layer: str, folder: Path) -> Any:
    """The linear layer or embedding of a name in a checkpoint, which may lack the model's prefix."""
    import torch

    for name in (layer, f"{model.base_model_prefix}.{layer}"):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            return module
    raise UserError(f"{folder}: weight_scale of {layer}, which is no linear layer and no embedding of this model")


def codes_of(module: nn.Module) -> Codes | None:
    """The scales of a linear layer's codes, if the checkpoint has them and the engine multiplies such codes."""
    codes: Codes | None = getattr(module, "codes", None)
    return codes


def set_codes(module: nn.Module, codes: Codes) -> None:
    """Let `codes_of` find these."""
    module.codes = codes  # type: ignore[assignment]


def renew(module: nn.Module) -> None:
    """New scales after the weight of a layer with codes has changed."""
    import torch

    codes = codes_of(module)
    if codes is not None:
        assert isinstance(module.weight, torch.Tensor)
        set_codes(module, Codes(codes.kind, largest_scales(module.weight, codes.kind)))


def largest_scales(weight: Tensor, kind: Kind) -> Tensor:
    """The scale of each output of weight [O, I], float32 [O]: its largest code is the kind's limit."""
    return weight.detach().float().abs().amax(dim=1) / LIMITS[kind]
