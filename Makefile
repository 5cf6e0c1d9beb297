# Two commands need nothing but this file on a bare Debian: `make demo` and `make test`.
# Variables: VENV (.venv), PYTHON (interpreter for the venv), TORCH_SPEC (torch==2.13.0), ASSETS (of
# the demo: lite, the default, or libero), TEST_PROCESSES (2; 0: all tests in one process), PYTEST_ARGS,
# CASES, MINUTES and SEED of the hostile campaign and the soak.
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
TEST_PROCESSES ?= 2
CASES ?= 1000
MINUTES ?= 30
SEED ?= 0

.PHONY: help setup demo test test-slow test-hostile soak test-libraries check format lint types bench docs wheel

help:  ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## System packages, .venv, torch, the package (idempotent).
	@bash tools/setup.sh

demo: setup  ## Expert and VLA videos, TD3+BC on one task, evaluation (<= 10 min).
	$(BIN)/python examples/demo.py $(if $(ASSETS),--assets $(ASSETS)) $(DEMO_ARGS)

test: setup  ## The default test suite.
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

test-slow: setup  ## Parity, experts and training on many episodes.
	$(BIN)/python -m pytest -m slow --timeout=3600 $(PYTEST_ARGS)

test-hostile: setup  ## The campaign of bad arguments, files and command lines (CASES=1000 SEED=0).
	$(BIN)/python tests/hostile/campaign.py --cases $(CASES) --seed $(SEED) $(HOSTILE_ARGS)

soak: setup  ## Commands under random signals and memory pressure (MINUTES=30 SEED=0).
	$(BIN)/python tests/hostile/soak.py --minutes $(MINUTES) --seed $(SEED) $(SOAK_ARGS)

test-libraries: setup  ## Examples and buffers of seven RL libraries, and LeRobot, in environments of their own.
	@bash tools/libraries.sh python -m pytest -rs tests/libraries $(PYTEST_ARGS)

format: setup  ## Check the formatting (ruff format rewrites it).
	$(BIN)/ruff format --check .

lint: setup  ## Ruff.
	$(BIN)/ruff check .

types: setup  ## Mypy.
	$(BIN)/mypy

check: format lint types test  ## Format, lint, types and tests.

bench: setup  ## Speed beside LIBERO's and Gymnasium's vector environments.
	$(BIN)/vla-gym bench $(BENCH_ARGS)

docs: setup  ## This documentation as a site, in site/; every link and anchor must be right.
	@$(BIN)/python -m mkdocs --version >/dev/null 2>&1 || $(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: setup  ## Source distribution and wheel in dist/.
	$(BIN)/python -m build
