#!/usr/bin/env bash
# SkipDecode in vLLM on one GPU, in some ten minutes, without Ray and network; an environment of its own: `pip install
# 'vllm==0.32.*' peft pytest pytest-timeout hypothesis`. Answers against the library engine with both of vLLM's model
# runners, then throughput with random weights: plain vLLM with CUDA graphs, and the add-on at 2x and 3x. Results: $OUT or
# work/gpu: vllm.json, and a table at the end.
#   tests/benchmarks/gpu.sh [--shape llama-3-8b] [--rows 32,256,1024] [--prompt-tokens 128] [--new-tokens 128]
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=. TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
failed=0
for runner in 0 1; do
	echo "model runner V$((runner + 1))"
	VLLM_USE_V2_MODEL_RUNNER=$runner "$python" -m pytest tests/vllm_addon/test_answers.py -q || failed=1
done
"$python" tests/benchmarks/vllm_speed.py --out "${OUT:-work/gpu}/vllm.json" "$@" || failed=1
exit $failed
