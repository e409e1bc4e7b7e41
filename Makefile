# Two commands for a newcomer: `make demo` and `make test`. Both make .venv and install into it when it is missing.
PYTHON ?= python3
# The release the project is tested with; any torch >= 2.11 works. Override for a CUDA or CPU build of your choice:
#   make demo TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-long lint unit figures clean
help:
	@echo "make demo   set up and run the whole workflow on this machine (tokenizer, data, training, conversion, text)"
	@echo "make test   set up and run the linters and all tests"
	@echo "make test-long   the long forms of the tests (exactness of every layout: minutes to an hour)"
	@echo "make figures   count again what bench/results holds and needs no quiet machine, and bring the README's table up to date"
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

BENCH := $(BIN)/trimegatron bench
RESULTS := bench/results
MODEL := --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32767
figures: $(VENV)/installed
	$(BENCH) activations --out $(RESULTS)/activations.json
	$(BENCH) activations --hidden-size 64 --num-attention-heads 4 --sweep seq-length --out $(RESULTS)/activations-seq-length.json
	$(BENCH) bubble --out $(RESULTS)/bubble.json
	$(BENCH) bubble --ranks 8 --sweep micro-batches --out $(RESULTS)/bubble-micro-batches.json
	$(BENCH) memory --out $(RESULTS)/memory.json
	$(BENCH) memory --sweep hidden-size --out $(RESULTS)/memory-hidden-size.json
	$(BENCH) operators --out $(RESULTS)/operators.json
	$(BENCH) parallel $(MODEL) --world-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
		--use-distributed-optimizer --global-batch-size 64 --out $(RESULTS)/parallel.json
	$(BENCH) parallel $(MODEL) --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sweep world-size \
		--out $(RESULTS)/parallel-world-size.json
	$(BENCH) kernels --no-launch --out $(RESULTS)/kernels.json
	$(BENCH) kernels --no-launch --no-code --sweep hidden --out $(RESULTS)/kernels-hidden.json
	$(BENCH) kernels --no-launch --no-code --hidden 4096 --sweep rows --out $(RESULTS)/kernels-rows.json
	$(BENCH) report --readme

clean:
	rm -rf $(VENV) demo build dist *.egg-info
