#!/usr/bin/env bash
# SkipDecode in vLLM on one GPU, without network, in parts, those whose results matter most first:
#   tests/benchmarks/gpu.sh [PART...]
# Parts (default: all): versions tests labels labels_shared texts texts_full job adapt options large_model
# Needs `pip install 'vllm==0.32.*' peft pytest pytest-timeout pytest-xdist hypothesis`, no Ray. Each line
# of a table is a process; raw results are written to $OUT (default work/gpu) as they come. A part takes 1 to 8 minutes
# on an H200. Another version of vLLM or a failed test ends the run, because all other results are worthless then.
# SHAPE=tiny tries all parts on a CPU beforehand.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=${PYTHON:-python3} out=${OUT:-work/gpu} shape=${SHAPE:-llama-3-8b} large_shape=llama-32b gpus=1 memory=0.85
rows=32,256,1024 middle=256 in_flight=1024 label_rows=4000 job_rows=4000 new=128 prompt=512 shared=384 steps=50
capture='{"compilation_config": {"max_cudagraph_capture_size": 1024}}'
if [ "$shape" = tiny ]; then
	large_shape=tiny gpus=0 memory=0.1 rows=2,4 middle=4 in_flight=8 label_rows=12 job_rows=24 new=8 prompt=64 shared=32
	steps=20 capture='{}'
fi
mkdir -p "$out"

speed() { # NAME OPTIONS...: a table by vllm_speed.py
	local name=$1
	shift
	echo "== $name"
	"$python" tests/benchmarks/vllm_speed.py --shape "$shape" --memory "$memory" --predict --limit 240 \
		--out "$out/$name.json" "$@" | tee "$out/$name.md"
}

texts_of() { # NAME ROWS OPTIONS LINES
	speed "$1" --rows "$2" --prompt-tokens "$new" --new-tokens "$new" --options "$3" --lines "$4"
}

labels_of() { # NAME SHARED: a prompt's tokens in, one of 16 labels out; falling depths are eager here
	speed "$1" --task labels --rows "$label_rows" --max-rows "$in_flight" --prompt-tokens "$prompt" --new-tokens 1 \
		--shared "$2" --lines "plain;uniform 2x;uniform 3x;falling 2x, first"
}

versions() {
	"$python" - <<-END | tee "$out/versions.txt" || exit 1
		import platform, torch, vllm
		from importlib.util import find_spec
		device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
		print("vllm", vllm.__version__, "torch", torch.__version__, "python", platform.python_version(), "on", device)
		print(*(f"{name}: {'found' if find_spec(name) else 'missing'}" for name in ("ray", "flashinfer", "peft")))
		assert vllm.__version__.startswith("0.32."), "the add-on is for vLLM 0.32"
	END
	[ $gpus = 0 ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee -a "$out/versions.txt"
}

tests() { # token for token in float32, with both of vLLM's model runners
	local runner log
	for runner in 1 0; do # V2, vLLM's default, first
		log=$out/tests-v$((runner + 1)).log
		echo "== tests, model runner V$((runner + 1))"
		VLLM_USE_V2_MODEL_RUNNER=$runner "$python" -m pytest -q -x ${TEST_OPTIONS:--n 4} tests/vllm_addon/test_graphs.py \
			tests/vllm_addon/test_uniform.py tests/vllm_addon/test_answers.py >"$log" 2>&1 ||
			{ tail -n 40 "$log"; exit 1; }
		tail -n 1 "$log"
	done
}

labels() { labels_of labels 0; }

labels_shared() { labels_of labels-shared "$shared"; }

texts() {
	texts_of texts "$rows" "$capture" \
		"plain;uniform 2x;one layer;falling 2x, first, graphs;uniform 3x;falling 3x, first, graphs"
	cat <<-END
		If uniform 2x is below 1.35 at 256 rows although its step is that of one layer: work on the host, not on graphs.
		If falling 2x with graphs is nowhere above uniform 2x: use graphs for models of 30B and more only.
		If graphs take 15 s more to start than without: capture fewer sizes.
	END
}

texts_full() {
	texts_of texts-full "$rows" "$capture" \
		"plain;falling 2x, full, graphs;falling 3x, full, graphs;falling 2x, first;falling 2x, full"
}

job() { # a whole job against the bare engine
	"$python" -c "import ray" 2>/dev/null || echo "Ray is not installed: the job runs in the tests' in-process backend"
	"$python" tests/benchmarks/overhead.py --shape "$shape" --gpus $gpus --rows "$job_rows" --max-rows "$in_flight" \
		--rounds 1 --systems "skipdecode run,LLM.generate,vllm bench throughput" --out "$out/job"
}

adapt() { # the training of `adapt`, killed and resumed
	"$python" tests/benchmarks/gpu_adapt.py --shape "$shape" --steps "$steps" --words "$new" --out "$out/adapt.json"
}

options() { # FP8 weights, and FlashInfer where it is installed
	local lines="plain;uniform 2x;falling 2x, first, graphs"
	[ $gpus = 0 ] || texts_of fp8 "$middle" '{"quantization": "fp8"}' "$lines"
	if "$python" -c "import flashinfer" 2>/dev/null; then
		texts_of flashinfer "$middle" '{"attention_config": {"backend": "FLASHINFER"}}' "$lines"
	else
		echo "FlashInfer is not installed"
	fi
}

large_model() { # 32B: its time on the GPU hides the host's
	[ "$shape" = tiny ] || memory=0.92
	shape=$large_shape texts_of large "$rows" "$capture" "plain;uniform 2x;falling 2x, first, graphs"
}

[ $# -gt 0 ] || set -- versions tests labels labels_shared texts texts_full job adapt options large_model
for part in "$@"; do "$part"; done
