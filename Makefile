# SPDX-License-Identifier: Apache-2.0
# make demo   a real vLLM frontend and the engine beside it, on this machine
# make test   unit, wire and end-to-end tests (real Rust frontends)
PYTHON = python3
VENV := .venv
BIN := $(VENV)/bin
RUN_VENV := $(VENV)/.installed-run
TEST_VENV := $(VENV)/.installed-test
LINT_VENV := $(VENV)/.installed-lint

.PHONY: help demo test test-python-frontend lint format docs clean
.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

demo: $(RUN_VENV) ## serve a chat completion with a real vLLM frontend and this engine
	@$(BIN)/python deploy/demo.py

test: $(TEST_VENV) ## unit, wire and end-to-end tests, the latter with real Rust frontends; some 3 minutes
	@echo "Fetching what is missing of the real Rust frontends (once per machine, 60 MB each to keep) ..."
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0 0.30.0 0.27.1 0.24.0
	@echo "Running unit, wire and end-to-end tests ..."
	$(BIN)/python -m pytest --durations=10 -m "not python_frontend"

test-python-frontend: $(TEST_VENV) ## end-to-end tests with a real Python frontend; builds its environment (2 GB) once
	@$(BIN)/python tests/support/python_frontend.py
	$(BIN)/python -m pytest --durations=10 -m python_frontend

lint: $(LINT_VENV) ## ruff, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(LINT_VENV) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(RUN_VENV) ## write the generated parts of docs/ anew
	$(BIN)/python -m mockengine.settings_docs docs/settings.md

clean: ## remove what was made here; downloads stay in the user's cache folder
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A Python that is asked for by name must be the one that is used.
ifneq ($(origin PYTHON) $(MAKECMDGOALS),command line clean)
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell $(BIN)/python -V 2>&1))
$(error $(VENV) was made with $(shell $(BIN)/python -V 2>&1), not with $(PYTHON): run "make clean" first)
endif
endif
endif
endif

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "$(PYTHON) is not installed. On Debian and Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mockengine needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(RUN_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(TEST_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(RUN_VENV)

$(LINT_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	@touch $@ $(TEST_VENV) $(RUN_VENV)
