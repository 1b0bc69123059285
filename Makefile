# make train: a fresh machine to a trained MoE.   make test: a fresh machine to green.
# TORCH picks the build. The pin is what the measurements in docs/ were made with.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODULE ?= deepseek_v3
CONFIG ?= deepseek_v3_debugmodel

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help train test test-slow lint types unit format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# torch first, so that nothing later pulls in another build of it.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

train: $(READY)  ## install if needed, then train the debug model, sample from it and say where the run is
	$(BIN)/spurline train --module $(MODULE) --config $(CONFIG) $(ARGS)

test: lint types unit  ## install if needed, then lint, type check and the tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -m 'not slow'

test-slow: $(READY)  ## the suites that take many minutes, and properties on examples they have not met
	$(BIN)/pytest -m slow --timeout=3600
	$(BIN)/pytest -m 'hypothesis and not slow' --hypothesis-profile=new --timeout=3600

format: $(READY)  ## what pre-commit does
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and the caches, keep outputs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
