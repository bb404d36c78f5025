"""Kernels against the library's products in bfloat16, as an actor measures them when it chooses (engine/cpu/choice.py).

    [ONEDNN_MAX_CPU_ISA=AVX512_CORE] .venv/bin/python tests/benchmarks/product_choice.py [--threads 1]

For the shapes of some models: microseconds of one token in a step of 32 rows and one of a prompt, by each, and what the
measurement itself takes. Nothing is recorded.
"""

from __future__ import annotations

import argparse
import time

import torch

from actors.engine.cpu import library
from actors.engine.cpu.choice import Products, chosen, encoded, measured

MODELS = {
    "demo": Products(((576, 192), (192, 192), (768, 192), (192, 384)), 24, (2048, 192), stacks=True),
    "SmolLM2-135M": Products(((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576), stacks=True),
    "OPT-125M": Products(((2304, 768), (768, 768), (3072, 768), (768, 3072)), 12, (50272, 768), stacks=True),
    "Llama-3-8B": Products(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32, (128256, 4096), stacks=True),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    if not library.multiplies(torch.bfloat16, torch.device("cpu")):
        raise SystemExit("no kernel for products: the processor has no AVX512-BF16, or there is no compiler")
    print("| model | kernels, µs | library, µs | library ÷ kernels | chosen | seconds of processor |")
    print("|---|---:|---:|---:|---|---:|")
    for name, products in MODELS.items():
        began = time.process_time()
        seconds = measured(products)
        took = time.process_time() - began
        micro, other = seconds["kernels"] * 1e6, seconds["library"] * 1e6
        figures = f"{micro:,.0f} | {other:,.0f} | {other / micro:.2f} | {chosen(encoded(seconds))} | {took:.2f}"
        print(f"| {name} | {figures} |")


if __name__ == "__main__":
    main()
