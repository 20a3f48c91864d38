# SPDX-License-Identifier: Apache-2.0
# make demo   a real vLLM frontend and the engine beside it, on this machine
# make test   unit, wire and end-to-end tests (real Rust frontends)
# make images the container images of the engine and of the Rust frontend
PYTHON = python3
VENV := .venv
BIN := $(VENV)/bin
RUN_VENV := $(VENV)/.installed-run
TEST_VENV := $(VENV)/.installed-test
# Of their own: what they need meddles with pytest.
SECURITY := build/security
SECURITY_VENV := $(SECURITY)/.installed
LINT_VENV := $(VENV)/.installed-lint
BENCH_VENV := $(VENV)/.installed-bench

# The lock is made with the oldest Python that it is for: the newest release for a newer one may not run on it.
LOCK_PYTHON = python3.11
LOCK_VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mockengine/pip-tools-7.6.2
PIP_COMPILE = CUSTOM_COMPILE_COMMAND="make lock" $(LOCK_VENV)/bin/pip-compile --quiet --upgrade --generate-hashes \
	--strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

# These look at processes and clocks, so they have the machine for themselves. All others are shared among its cores, a
# file at a time, since its tests may share what they set up.
ALONE := tests/admin tests/benchmarks tests/testing tests/transport \
	$(addprefix tests/e2e/test_, calamities.py data_parallel.py kv_events.py live_control.py load.py resume.py rust.py) \
	tests/test_cli.py tests/test_health.py tests/test_smoke.py tests/test_startup.py
ON_ALL_CORES := --numprocesses auto --maxprocesses 4 --dist loadfile $(addprefix --ignore=,$(ALONE))
QUICK := -m "not python_frontend and not failure_modes and not manifests and not containers and not browser and not security"

.PHONY: help demo test test-python-frontend test-failure-modes failure-modes faults test-browser test-security fuzz sbom audit soak test-manifests test-containers bench bench-check images lint format docs lock clean
.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

demo: $(RUN_VENV) ## serve a chat completion with a real vLLM frontend and this engine
	@$(BIN)/python deploy/demo.py

test: $(TEST_VENV) ## unit, wire and end-to-end tests, the latter with real Rust frontends; some 3 minutes
	@echo "Fetching what is missing of the real Rust frontends (once per machine, 60 MB each to keep) ..."
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0 0.30.0 0.27.1 0.24.0
	@echo "Running unit, wire and end-to-end tests ..."
	$(BIN)/python -m pytest --durations=10 $(QUICK) $(ON_ALL_CORES)
	$(BIN)/python -m pytest --durations=10 $(QUICK) $(ALONE)

test-python-frontend: $(TEST_VENV) ## end-to-end tests with a real Python frontend; builds its environment (2 GB) once
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0
	@$(BIN)/python tests/support/python_frontend.py
	$(BIN)/python -m pytest --durations=10 -m python_frontend

test-failure-modes: $(TEST_VENV) ## end real frontends and their engines in every way, and compare with what the docs say
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0 0.30.0 0.27.1 0.24.0
	@$(BIN)/python tests/support/python_frontend.py
	$(BIN)/python -m pytest --durations=5 -m failure_modes

failure-modes: $(TEST_VENV) ## do the same and write the tables of docs/failure-modes.md anew
	$(BIN)/python -m tests.support.failure_modes

faults: $(TEST_VENV) ## let all faults strike beside real frontends and write the tables of docs/faults.md anew
	$(BIN)/python -m tests.support.fault_runs

test-browser: $(TEST_VENV) ## look at the engine's page with Chromium, which must be there (apt-get install chromium)
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0
	$(BIN)/python -m pytest --durations=5 -m browser

test-security: $(SECURITY_VENV) ## break the admin port and the wire, and write the bill of materials
	@$(SECURITY)/bin/python -m mockengine.testing.fetch 0.33.0
	$(SECURITY)/bin/python -m pytest -m security tests/security
	$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=30
	$(MAKE) --no-print-directory sbom

FUZZ_SECONDS = 600
fuzz: $(SECURITY_VENV) ## feed an engine with messages that a fuzzer makes, for ten minutes
	@mkdir -p build/fuzz
	$(SECURITY)/bin/python -m tests.support.fuzz_wire -max_total_time=$(FUZZ_SECONDS) -max_len=600 -artifact_prefix=build/fuzz/

sbom: $(SECURITY_VENV) ## write what the image has of other people's into build/sbom.json, as CycloneDX
	@mkdir -p build
	$(SECURITY)/bin/cyclonedx-py requirements --output-reproducible --of JSON -o build/sbom.json requirements.lock

audit: $(SECURITY_VENV) ## ask PyPI for known vulnerabilities of what the image has
	$(SECURITY)/bin/pip-audit --requirement requirements.lock --disable-pip --strict

SOAK_SECONDS = 1800
soak: $(TEST_VENV) ## half an hour of everything at once beside a Rust frontend that is restarted, and then the accounts
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0
	$(BIN)/python -m tests.support.soak $(SOAK_SECONDS)

test-manifests: $(TEST_VENV) ## render what deploy/ has for Kubernetes and check it; Linux on x86_64 only
	@echo "Fetching kubectl and helm, if they are missing (once per machine, 70 MB) ..."
	@$(BIN)/python -m tests.support.kubernetes_tools
	$(BIN)/python -m pytest --durations=5 -m manifests

test-containers: $(TEST_VENV) ## build both images and test them, and what is made of them, with a real Docker engine
	@$(BIN)/python -m tests.support.kubernetes_tools
	$(BIN)/python -m pytest --durations=10 -m containers

bench: $(BENCH_VENV) ## measure what the engine costs, in ratios to a plain loop; some 9 minutes, on a machine with nothing else to do
	@$(BIN)/python -m mockengine.testing.fetch 0.33.0
	$(BIN)/python -m benchmarks --json build/bench/figures.json --plot build/bench/cost.png
	@echo "The figures and the picture are in build/bench/."

bench-check: $(RUN_VENV) ## measure some of it in half a minute; fails if a ratio is worse than expected by more than 1.5
	$(BIN)/python -m benchmarks --short --json build/bench/check.json

images: ## build the images of the engine and of the Rust frontend
	docker build --tag mockengine:0.1.0 .
	docker build --tag mockengine-frontend:0.33.0 --file deploy/frontend/Dockerfile deploy

lint: $(LINT_VENV) ## ruff, formatting, types; Dockerfiles and shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile deploy/frontend/Dockerfile
	$(BIN)/shellcheck .ci/run deploy/frontend/health.sh

format: $(LINT_VENV) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(RUN_VENV) ## write anew what follows from the settings: table, .env.example, compose variables
	$(BIN)/python -m mockengine.settings_docs docs/settings.md .env.example docker-compose.yml
	$(BIN)/python -m deploy.helm.write_schema

lock: $(LOCK_VENV) ## pin the newest dependencies of the engine's image, with their hashes
	$(PIP_COMPILE) --extra admin --extra text --output-file requirements.lock pyproject.toml
	$(PIP_COMPILE) --only-build-deps --build-deps-for wheel --output-file requirements-build.lock pyproject.toml

clean: ## remove what was made here; downloads stay in the user's cache folder
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

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

$(LOCK_VENV):
	@command -v $(LOCK_PYTHON) >/dev/null || \
		{ echo "The lock is made with Python 3.11, and $(LOCK_PYTHON) is not installed. Name it: make lock LOCK_PYTHON=..." >&2; exit 1; }
	$(LOCK_PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check pip-tools==7.6.2 || { rm -rf $@; exit 1; }

$(RUN_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(TEST_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(RUN_VENV)

$(SECURITY_VENV): pyproject.toml | $(BIN)/python
	@$(PYTHON) -m venv $(SECURITY)
	$(SECURITY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[security]'
	@touch $@

$(LINT_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	@touch $@ $(TEST_VENV) $(RUN_VENV)

$(BENCH_VENV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ $(RUN_VENV)
