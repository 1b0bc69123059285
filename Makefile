# make train: install and train a small MoE.   make test: install and run all checks.
# TORCH: another PyTorch, as words for pip: make train TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130".
# By default it is a CPU build of the version that the measurements in docs/ were made with. See docs/install.md.
PYTHON ?= python3
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
CPU_TORCH := torch==2.13.0
MODULE ?= deepseek_v3
CONFIG ?= deepseek_v3_first

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet
RUNS := .venv/.runs
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help train quick test test-slow verify soak soak-runs walk lint types unit format docs release clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# torch comes first, so that no dependency pulls in another build. Where the index of CPU builds can't be reached, it is
# the one that pip finds elsewhere. A TORCH of one's own is passed on as it is; an empty one counts as none, because
# Docker sets a build argument that was not given to the empty string.
ifeq ($(strip $(TORCH)),)
INSTALL_TORCH = $(PIP) --retries 0 --timeout 5 --index-url $(CPU_WHEELS) $(CPU_TORCH) 2>/dev/null || \
    { echo 'no answer from $(CPU_WHEELS): PyTorch from the default index'; $(PIP) $(CPU_TORCH); }
else
INSTALL_TORCH = $(PIP) $(TORCH)
endif

$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL_TORCH)
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(READY): $(RUNS)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: $(RUNS)  ## install if needed, then train a small MoE for two minutes and sample from it
	$(BIN)/spurline train --module $(MODULE) --config $(CONFIG) $(ARGS)

quick: lint types  ## a first verdict in about a minute: lint, types, and the eager layer against the reference
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow' -k 'not compil and not generated' \
	    tests/test_house.py tests/test_config.py tests/ops tests/moe tests/distributed/test_own_parts.py

# The type checker has one thread: it runs beside the tests, not before them with one core idle.
test: lint  ## install if needed, then lint, type check and test
	@$(MAKE) --no-print-directory --jobs 2 types unit

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

soak: $(READY)  ## 100 random faults on 4 ranks under torchrun, compared with a run without: about 15 minutes
	$(BIN)/python -m spurline.testing.soak faults --faults 100 --seconds 1200 $(ARGS)

soak-runs: $(READY)  ## 200 complete runs on 2 ranks in a row, none of which may abort
	$(BIN)/python -m spurline.testing.soak runs --runs 200 --seconds 7200 $(ARGS)

walk: $(READY)  ## run every command of the README and of docs/ as written, each page in a fresh clone: more than an hour
	$(BIN)/python tests/walk_pages.py $(PAGES)

format: $(READY)  ## fix lint and formatting, like pre-commit
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the documentation site into site/, and fail on any broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(READY)  ## build a wheel and an sdist, check them, and install the wheel in a clean environment
	rm -rf dist .venv-release
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-release
	$(subst $(BIN),.venv-release/bin,$(INSTALL_TORCH))
	.venv-release/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../.venv-release/bin/spurline configs
	rm -rf .venv-release

clean:  ## remove the environment, caches, and what was built; keeps outputs/
	rm -rf .venv .venv-release dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
