# `make demo` runs the main job, `make test` passes the tests; both set up all they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
# Nothing here may ask a hub: tokenizers and data are local files.
export HF_HUB_OFFLINE := 1
# Two cores are shared by many processes here; BLAS threads of their own only get in the way.
export OPENBLAS_NUM_THREADS := 1
# Tests mostly wait for processes that they start, so three files at a time suit two cores.
BESIDE := -n 3 --dist loadfile

.PHONY: help demo test test-slow soak test-sglang test-browser lint format bench bench-capture bench-quick clean
help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.product ## Run the whole job on the embedded engine and verify its store
	producer demo

test: $(VENV)/.dev ## Run the tests (under 6 minutes)
	python -m pytest -m 'not slow and not sglang and not browser' $(BESIDE) --durations=10

test-slow: $(VENV)/.dev ## Run the kill suites and other slow tests
	python -m pytest -m slow $(BESIDE) --durations=10

MINUTES ?= 30
soak: $(VENV)/.dev ## Faults of every kind for MINUTES (30) on a job that goes on, by SEED; then every invariant
	python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

test-sglang: $(VENV)/.dev ## Run the tests on a real SGLang: EYAS_SGLANG_PYTHON, else one is built once (2.5 GB)
	python -m tests.sglang.environment.build
	python -m pytest -m sglang tests/sglang --durations=10

test-browser: $(VENV)/.dev ## Run the tests of Flower's page in Chromium: `apt-get install -y chromium chromium-driver`
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	python -m pytest -m browser tests/browser --durations=10

lint: $(VENV)/.dev ## Check format, lint, types and import arrows
	ruff format --check .
	ruff check .
	mypy
	lint-imports

format: $(VENV)/.dev ## Rewrite the files in the house format
	ruff format .
	ruff check --fix .

bench: $(VENV)/.dev ## Print each figure of the README as a ratio measured in the same run
	python -m ops.bench

bench-capture: $(VENV)/.dev ## What a capture costs a real SGLang: EYAS_SGLANG_PYTHON, else one is built once (2.5 GB)
	EYAS_SGLANG_PYTHON=$$(python -m tests.sglang.environment.build | sed -n 's/^python=//p') python -m ops.bench.capture

bench-quick: $(VENV)/.dev ## The same, small: shows that every benchmark runs
	python -m ops.bench --quick

clean: ## Delete what the targets above made
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: Python 3.11 or newer is needed' >&2; echo >&2; echo 'hint: make PYTHON=python3.12 …' >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.product: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo 'installing what Eyas needs into $(VENV): a minute or two, once'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.product
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
