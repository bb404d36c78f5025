# Needs Python 3.11 or newer with venv, and make.
PYTHON ?= python3
PIP_INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint bench clean

demo: .venv/installed
	@.venv/bin/python -m pipeline.demo work/demo/prompts
	@.venv/bin/skipdecode run configs/demo.yaml --show 5

test: .venv/installed-dev
	.venv/bin/python -m pytest -n 2 --dist loadfile --cov --durations=10

test-slow: .venv/installed-dev
	.venv/bin/python -m pytest -m slow

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv/installed-dev
	.venv/bin/python tests/benchmarks/throughput.py
	.venv/bin/python tests/benchmarks/features.py

clean:
	rm -rf .venv work

.venv/installed: pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
