# Two commands for a newcomer: `make demo` and `make test`. Both make .venv and install into it when it is missing.
PYTHON ?= python3
# The release the project is tested with; any torch >= 2.11 works. Override for a CUDA or CPU build of your choice:
#   make demo TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-long lint unit clean
help:
	@echo "make demo   set up and run the whole workflow on this machine (tokenizer, data, training, conversion, text)"
	@echo "make test   set up and run the linters and all tests"
	@echo "make test-long   the long forms of the tests (exactness of every layout: minutes to an hour)"
	@echo "make lint   ruff and mypy only;  make unit   tests only;  make clean   remove .venv and the demo's output"

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/trimegatron demo --out demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest

test: lint unit

test-long: $(VENV)/installed
	$(BIN)/python -m pytest -m long

clean:
	rm -rf $(VENV) demo build dist *.egg-info
