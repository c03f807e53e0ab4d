"""Faults and hostile input. `make torture` runs the long version and writes what it counted to
docs/results/torture.json; the short one, of the same tests, is a part of `make test`."""

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import urrl

LONG = "URRL_TORTURE" in os.environ  # the file for the counts
COUNTS: dict[str, Counter[str]] = defaultdict(Counter)


@pytest.fixture(scope="session")
def times():
    """times(short, long): how often something is done."""
    return lambda short, long: long if LONG else short


@pytest.fixture(scope="session")
def count():
    """count("killed", survived=1, lost=0): adds to the row of that fault in the table."""

    def add(kind: str, **figures: int) -> None:
        COUNTS[kind].update({"tried": sum(figures.values()), **figures})

    return add


def pytest_terminal_summary(terminalreporter):
    if not COUNTS:
        return
    terminalreporter.section("torture")
    for kind, figures in COUNTS.items():
        terminalreporter.write_line(f"{kind:<60} {', '.join(f'{n} {what}' for what, n in figures.items())}")
    if LONG:
        report = {"version": urrl.__version__, "date": time.strftime("%Y-%m-%d"), "counts": COUNTS}
        Path(os.environ["URRL_TORTURE"]).write_text(json.dumps(report, indent=2) + "\n")
