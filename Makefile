# `make demo` and `make test` need nothing but Python 3.11 and pip.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test bench torture clean

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

# An hour of kills, full disks, damage, hostile files and fuzzing; `make test` has a short version of the same.
torture: .venv/ready
	URRL_TORTURE=docs/results/torture.json $(BIN)/python -m pytest tests/torture --timeout 7200

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache
