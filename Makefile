# Needs Python >= 3.10, pip and make; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LIBRARIES := $(VENV)/.libraries

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install verify test upstream gpu lint clean

help:
	@echo "make verify    verify all built-in subjects, and show the collectives of one transformer block"
	@echo "make test      run the CPU tests, and the GPU tier's path with the device forced to the CPU"
	@echo "make upstream  verify released code of every library that has an adapter; installs deepspeed, torchtitan and transformers too"
	@echo "make gpu       run the GPU tier with the packages that \$$(PYTHON) has (ARGS=--cpu: on the CPU); installs nothing"
	@echo "make lint      ruff, mypy and import-linter"
	@echo "make clean     remove .venv, caches and build outputs"

# A new environment only when the pins or the project's own requirements have changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	@touch $@

# Released code that is verified in every run: it needs no more than the torch and numpy that are there.
$(LIBRARIES): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps fairscale megatron-core
	@touch $@

install: $(INSTALLED)

verify: $(INSTALLED)
	$(BIN)/tpverify verify --max-examples 25
	$(BIN)/tpverify ledger transformer_block

test: $(LIBRARIES)
	$(BIN)/python -m pytest -n 2 properties
	PYTHON=$(BIN)/python gpu_suite/run.sh --cpu --gpu-tier tiny

# The other libraries bring packages of their own; torchtitan needs Python >= 3.11.
upstream: $(LIBRARIES)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[deepspeed,torchtitan,transformers]'
	$(BIN)/python -m pytest -n 2 properties/upstream

# Where torch, pytest, hypothesis, click, rich, jinja2 and numpy are there already, as in a GPU image.
gpu:
	PYTHON=$(PYTHON) gpu_suite/run.sh $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist *.egg-info
	find tpverify properties gpu_suite -name __pycache__ -type d -prune -exec rm -rf {} +
