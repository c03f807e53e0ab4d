# `make demo` and `make test` need nothing but Python 3.11 and pip.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test bench clean

demo: .venv/ready
	$(BIN)/urrl demo

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: .venv/ready
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python benchmarks/run.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache
