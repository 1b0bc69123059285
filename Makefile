# make train: install and train a small MoE.   make test: install and run all checks.
# TORCH selects the PyTorch build; the pinned version is the one used for the measurements in docs/.
PYTHON ?= python3
TORCH ?= torch==2.13.0
MODULE ?= deepseek_v3
CONFIG ?= deepseek_v3_debugmodel

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help train quick test test-slow verify soak soak-runs lint types unit format docs release clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# Install torch first, so that no dependency pulls in another build.
$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

train: $(READY)  ## install if needed, then train the debug model and sample from it
	$(BIN)/spurline train --module $(MODULE) --config $(CONFIG) $(ARGS)

quick: lint types  ## a first verdict in about a minute: lint, types, and the eager layer against the reference
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow' -k 'not compil and not generated' \
	    tests/test_house.py tests/test_config.py tests/ops tests/moe tests/distributed/test_own_parts.py

test: lint types unit  ## install if needed, then lint, type check and test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile -m 'not slow'

test-slow: $(READY)  ## run the slow tests, and property tests with new random examples
	$(BIN)/pytest -m slow --timeout=3600
	$(BIN)/pytest -m 'hypothesis and not slow' --hypothesis-profile=new --timeout=3600

verify: $(READY)  ## compare every parallel configuration with one process
	$(BIN)/spurline verify --full

soak: $(READY)  ## about 15 minutes of random faults on 4 ranks under torchrun, against a run without
	$(BIN)/python -m spurline.testing.soak faults --faults 100 --seconds 900 $(ARGS)

soak-runs: $(READY)  ## 200 complete runs on 2 ranks in a row, none of which may abort
	$(BIN)/python -m spurline.testing.soak runs --runs 200 --seconds 7200 $(ARGS)

format: $(READY)  ## fix lint and formatting, like pre-commit
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the documentation site into site/, and fail on any broken link
	$(BIN)/mkdocs build --strict

release: $(READY)  ## build a wheel and an sdist, check them, and install the wheel in a clean environment
	rm -rf dist .venv-release
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet '$(TORCH)'
	.venv-release/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../.venv-release/bin/spurline configs
	rm -rf .venv-release

clean:  ## remove the environment and caches; keeps outputs/
	rm -rf .venv .venv-release dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
