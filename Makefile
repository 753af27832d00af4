# `make run` and `make test` set up all they need: a virtual environment in .venv, the tested versions of the
# dependencies, the embedded model in the user's cache folder and, for the tests, a Chromium.

SHELL := /bin/sh
VENV := .venv
# Another interpreter: make run PYTHON=/path/to/python (asked for only when .venv is made)
PYTHON :=
# Options of the program: make run ARGS="--port 8000"
ARGS :=
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

.DEFAULT_GOAL := help
.PHONY: help run test unit check model chromium format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

run: model ## start the page (options: ARGS="--port 8000"); Ctrl-C stops it
	@exec $(VENV)/bin/python app.py $(ARGS)

test: $(VENV)/installed-dev check model chromium ## all checks and tests
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not browser" -n logical --dist loadfile
	@exec $(VENV)/bin/python -m pytest -m browser

unit: $(VENV)/installed-dev ## the fast tests: no embedded model, no browser, no programs started
	@OMP_NUM_THREADS=1 exec $(VENV)/bin/python -m pytest -m "not embedded and not browser and not process" -n logical --dist loadfile

check: $(VENV)/installed-dev ## formatting, lint, types, import directions
	@$(VENV)/bin/ruff format --check --quiet . || { echo "Run 'make format'."; exit 1; }
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/python -m pytest -q tests/test_imports.py

format: $(VENV)/installed-dev ## format the code
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

model: $(VENV)/installed ## fetch and convert the embedded model, once
	@$(VENV)/bin/python -m specdemo.models.embedded

# The browser tests take a Chromium or Chrome of the system; where there is none, Playwright's own.
chromium: $(VENV)/installed-dev
	@for name in chromium chromium-browser google-chrome; do \
	    command -v $$name >/dev/null 2>&1 && exit 0; \
	done; $(VENV)/bin/python -m playwright install chromium

# A stamp is written last, so an installation that was broken off is taken up again.
$(VENV)/installed: requirements.txt constraints.txt
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	    for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.10 python3); do \
	        if $$python -c '$(SUPPORTED)' >/dev/null 2>&1; then \
	            echo "Making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV); exit; fi; \
	    done; \
	    echo "No Python 3.10 to 3.13 with its venv module was found: install one, or name it with PYTHON=..." >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	@touch $@

clean: ## remove .venv and what tools left; the model in the cache folder stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
