# Each environment is set up once, and again when setup.py or pyproject.toml change.
#
#   make quickstart    train the quick start (real images, one minute)
#   make test          the tests, at most 20 minutes on 2 cores
#   make test-all      the full matrices, too
#   make test-lowest   the oldest versions that are supported
#   make lint          ruff; `make format` repairs what can be repaired

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
LOWEST ?= .venv-lowest
# What is handed on: make quickstart ARGS="--replicas 4", make test ARGS="tests/test_cluster.py -x"
ARGS ?=
# Two processes of tests, a file each and in order: TensorFlow traces on one core.
WORKERS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

LOWEST_VERSIONS := "tensorflow==2.20.*" "keras==3.12.*" "tensorboard==2.20.*" "setuptools<81"
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help quickstart test test-all test-lowest lint format clean

help:
	@sed -n 's/^#   //p' Makefile

quickstart: $(VENV)/.examples
	$(VENV)/bin/python examples/quickstart.py $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(WORKERS) $(ARGS)

test-all: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(WORKERS) -m "" $(ARGS)

test-lowest: $(LOWEST)/.dev
	$(LOWEST)/bin/python -m pytest $(WORKERS) $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(LOWEST) build dist keras_replicator.egg-info

$(VENV)/bin/python $(LOWEST)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "keras_replicator needs Python 3.11 or newer. Received: PYTHON=$(PYTHON)." \
	           "Say which one to use: make PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv $(@:/bin/python=)

$(VENV)/.examples: setup.py pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --editable ".[examples]"
	touch $@

$(VENV)/.dev: setup.py pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --editable ".[dev,examples]"
	touch $@

# TensorBoard 2.20 imports pkg_resources, which setuptools 81 and later announce the end of, or lack.
$(LOWEST)/.dev: setup.py pyproject.toml Makefile | $(LOWEST)/bin/python
	$(LOWEST)/bin/python -m pip install $(LOWEST_VERSIONS) --editable ".[dev,examples]"
	touch $@
