#!/usr/bin/env bash
# The engine on one GPU, in one call of at most ten minutes: torch 2.11, transformers 5.17, Python 3.11 or newer, no Ray,
# no network, random weights. Results: $OUT or work/gpu: gpu.json, and a table on the way. Before it, products and kernels:
#   pytest tests/engine/test_gpu_{products,kernels,codes,cuda}.py
#   tests/benchmarks/gpu.sh [--minutes 9] [--shapes opt-1.3b,llama-3-8b,opt-6.7b] [--batches 32,128,1,largest] ...
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=. TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" tests/benchmarks/gpu_speed.py --out "${OUT:-work/gpu}" "$@"
