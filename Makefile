# Everything a person types. `make up` runs the product, `make test` proves it; both install what they need.
.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
# Suites without servers and child processes; a test of theirs that takes long carries the marker `slow`.
QUICK := tests/core tests/settings tests/engine tests/link tests/frontend tests/test_loop.py
export UV_PYTHON_DOWNLOADS := never

.PHONY: help setup setup-dev up test quick proof check format lock screenshots states bench dist image

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.run ## install what `up` needs into .venv (uv, the locked dependencies, enginehouse)
setup-dev: .venv/.dev

.venv/.run: requirements/run.txt pyproject.toml tools/setup
	@sh tools/setup run
	@touch $@

.venv/.dev: .venv/.run requirements/dev.txt
	@sh tools/setup dev
	@touch $@

up: setup ## run enginehouse on this machine (options: make up ARGS="--host 0.0.0.0")
	@exec $(BIN)/enginehouse up $(ARGS)

test: setup-dev ## all tests, as continuous integration runs them; ARGS="tests/core -x" runs just those
	@if [ -n "$(ARGS)" ]; then $(BIN)/python -m pytest -q $(ARGS); else $(MAKE) --no-print-directory check && $(BIN)/python tools/test.py; fi

quick: setup-dev ## lint, types, and the tests that need no process, in under a minute
	@$(MAKE) --no-print-directory check
	@$(BIN)/python -m pytest -q -m "not slow" $(QUICK)

proof: setup-dev ## the long tails: full crash sweeps, hundreds of kills and rounds, 20,000 simulations (an hour)
	@ENGINEHOUSE_PROOF=1 ENGINEHOUSE_SEEDS=20000 $(BIN)/python -m pytest -q -o faulthandler_timeout=3600 \
		tests/artifact tests/worker tests/fleet tests/sim tests/frontend/serving/test_soak.py $(ARGS)

check: setup-dev ## ruff, mypy --strict, import contracts, size budgets
	@$(BIN)/ruff check src tests bench tools
	@$(BIN)/ruff format --check src tests bench tools
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config .importlinter
	@$(BIN)/python tools/budgets.py

format: setup-dev ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix src tests bench tools
	@$(BIN)/ruff format src tests bench tools

screenshots: setup-dev ## pictures of every page of the web page, in every state
	@$(BIN)/python tools/screenshots.py

states: setup-dev ## serve the catalogue of states of the web page, to look at in a browser
	@$(BIN)/python -m tests.window.catalogue

bench: setup-dev ## every benchmark, quickly; each prints its ratio and its bar
	@for script in bench/*.py; do $(BIN)/python $$script --quick || exit 1; done

dist: setup ## build the wheel and the source archive into dist/
	@$(BIN)/python tools/dist.py

image: dist ## build the container image of frontend and worker with podman, buildah or docker; BASE, TAG
	@BASE="$(BASE)" sh tools/image $(TAG)

lock: setup-dev ## compile the hashed lock files anew from pyproject.toml
	@sh tools/setup lock
