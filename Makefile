# SPDX-License-Identifier: Apache-2.0
# Each target sets up all that it needs; nothing but make and Python 3.11 or newer has to be there.

VLLM ?= 0.29.0 0.34.0
PYTHON := .venv/bin/python
CODE := $(wildcard src tests tools examples benchmarks)

# All that is written stays below .venv, .cache and dist.
export PYTHONDONTWRITEBYTECODE := 1
export RUFF_CACHE_DIR := .cache/ruff
export MYPY_CACHE_DIR := .cache/mypy

.PHONY: setup demo test lint census matrix bench docs build clean

setup:
	@python3 tools/setup_env.py

demo: setup
	@$(PYTHON) examples/demo.py

test: lint
	@$(PYTHON) tools/overlay.py $(VLLM)
	$(PYTHON) -m pytest -n 2 --dist worksteal -o cache_dir=.cache/pytest $(VLLM:%=--vllm %)

lint: setup
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m mypy --strict src

census: setup
	$(PYTHON) tools/census.py --vllm $(lastword $(VLLM))

matrix: setup
	$(PYTHON) tools/matrix.py

bench: setup
	@$(PYTHON) tools/overlay.py 0.29.0
	@$(PYTHON) -m benchmarks

docs: setup
	$(PYTHON) tools/docs.py

build: setup
	$(PYTHON) -m build

clean:
	rm -rf .venv .cache dist
