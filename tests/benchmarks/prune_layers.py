"""A checkpoint without its least needed layers, removed for good: a dense model of fewer layers.

    .venv/bin/python tests/benchmarks/prune_layers.py BASE OUT --layers 15 --order "0,29,1,..."

The order lists the layers, most needed first, as `keep_order: measured` finds it. The first ones are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.model.families import family_of


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, required=True, help="layers kept")
    parser.add_argument("--order", required=True, help="all layers, most needed first, with commas")
    arguments = parser.parse_args()
    order = [int(number) for number in arguments.order.split(",")]
    prune(arguments.base, arguments.out, order[: arguments.layers])


def prune(base: Path, out: Path, kept: Sequence[int]) -> None:
    """Write `base` with the layers `kept` alone, in their usual sequence."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    layers = family_of(model.config).layers(model)
    left = nn.ModuleList(layers[number] for number in sorted(kept))
    parent = next(module for module in model.modules() if getattr(module, "layers", None) is layers)
    parent.layers = left
    for number, layer in enumerate(left):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(left)
    with torch.no_grad():
        model.save_pretrained(out)
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(out)
    print(f"{out}: layers {sorted(kept)} of {base}")


if __name__ == "__main__":
    main()
