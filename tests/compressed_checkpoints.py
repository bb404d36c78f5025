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


def scheme(kind: str, *, strategy: str = "channel", inputs: str | None = "dynamic") -> dict[str, Any]:
    """A group of config.json: weights of a kind, and how inputs are rounded: dynamic, static or None, not at all."""
    numbers = {"num_bits": 8, "type": TYPES[kind], "symmetric": True}
    activations: dict[str, Any] | None = None
    if inputs is not None:
        dynamic = inputs == "dynamic"
        activations = {**numbers, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": strategy}, "input_activations": activations}
    return group if inputs is not None else {**group, "format": "naive-quantized"}


def compressed(
    base: Path,
    folder: Path,
    kind: str,
    *,
    ignore: Sequence[str] = ("lm_head",),
    shards: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Path:
    """A copy of the checkpoint `base` with weights of 8 bits, scales from their largest numbers; dtype: of scales."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    config = QuantizationConfig(config_groups={"group_0": scheme(kind, **how)}, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weights = module.quantization_scheme.weights
        whole = weights.strategy == "tensor"
        low, high = (
            (end(module.weight)[None] if whole else end(module.weight, dim=1, keepdim=True))
            for end in (torch.amin, torch.amax)
        )
        scale, _ = calculate_qparams(low, high, weights)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
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
