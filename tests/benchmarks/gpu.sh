#!/usr/bin/env bash
# SkipDecode in vLLM on one GPU, in some ten minutes, without Ray and network; an environment of its own: `pip install
# 'vllm==0.32.*' peft pytest pytest-timeout pytest-xdist hypothesis`. Answers against the library engine with both of
# vLLM's model runners, then throughput with random weights: plain vLLM with CUDA graphs, and the add-on at 2x and 3x.
# Results: $OUT or work/gpu: answers-v1.log, answers-v2.log, vllm.json, and a table at the end.
#   tests/benchmarks/gpu.sh [--shape llama-3-8b] [--rows 32,256,1024] [--prompt-tokens 128] [--new-tokens 128]
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=${PYTHON:-python3} out=${OUT:-work/gpu} failed=0
mkdir -p "$out"
for runner in 0 1; do
	VLLM_USE_V2_MODEL_RUNNER=$runner "$python" -m pytest tests/vllm_addon/test_answers.py -q -n 5 \
		>"$out/answers-v$((runner + 1)).log" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || failed=1; done
for runner in 1 2; do
	echo "model runner V$runner"
	grep -E "^(FAILED|ERROR|E  )|passed|failed" "$out/answers-v$runner.log"
done
"$python" tests/benchmarks/vllm_speed.py --out "$out/vllm.json" "$@" || failed=1
exit $failed
