"""Checkpoints with weights of 8 bits, written by the library whose format they have."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

TYPES = {"int8": "int", "fp8": "float"}
GROUP = 16


def scheme(
    kind: str,
    *,
    strategy: str = "channel",
    inputs: str | None = "dynamic",
    symmetric: bool = True,
    layout: str | None = None,
    targets: str = "Linear",
) -> dict[str, Any]:
    """A group of config.json.

    Args:
        kind: of weights.
        strategy: of their scales: tensor, channel, or group, of 16 inputs.
        inputs: how they are rounded: dynamic, static or None, not at all.
        layout: the format's name; None: the library chooses.
        targets: which layers, by class or `re:` and a regular expression.
    """
    numbers = {"num_bits": 8, "type": TYPES[kind], "symmetric": True}
    activations: dict[str, Any] | None = None
    if inputs is not None:
        dynamic = inputs == "dynamic"
        activations = {**numbers, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    weights = {**numbers, "strategy": strategy, "symmetric": symmetric}
    if strategy == "group":
        weights["group_size"] = GROUP
    group = {"targets": [targets], "weights": weights, "input_activations": activations}
    return group if layout is None else {**group, "format": layout}


def compressed(
    base: Path,
    folder: Path,
    kind: str,
    *,
    ignore: Sequence[str] = ("lm_head",),
    shards: str = "5GB",
    dtype: torch.dtype = torch.float32,
    groups: Sequence[dict[str, Any]] = (),
    **how: Any,
) -> Path:
    """A copy of the checkpoint `base` with weights of 8 bits, scales from their largest numbers.

    Args:
        dtype: of scales.
        groups: of config.json, from `scheme`; none: one of `kind` and `how`.
    """
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    schemes = {f"group_{number}": group for number, group in enumerate(groups or [scheme(kind, **how)])}
    config = QuantizationConfig(config_groups=schemes, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weights = module.quantization_scheme.weights
        outputs = len(module.weight)
        shapes = {"tensor": (1, 1, -1), "channel": (outputs, 1, -1), "group": (outputs, -1, GROUP)}
        held = module.weight.view(shapes[weights.strategy])
        scale, zero = calculate_qparams(held.amin(dim=-1), held.amax(dim=-1), weights)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if not weights.symmetric:
            module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder, max_shard_size=shards)
    compressor.update_config(str(folder))
    return folder


def expanded(folder: Path, out: Path) -> Path:
    """The same checkpoint with plain weights in float32, expanded by the libraries."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    how = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how)
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(out)
    return out
