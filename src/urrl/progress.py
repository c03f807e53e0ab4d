"""What a person sees while a run trains: a bar with an ETA on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Progress:
    def __init__(self, quiet: bool = False, label: str = ""):
        self.quiet = quiet
        self.label = label
        self.bar: Any = None
        self.epochs = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def start(self, epochs: int, steps: int, done: int) -> None:
        self.epochs = epochs
        if self.quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = ("{task.description}", BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
                   "left", TimeRemainingColumn())  # fmt: skip
        self.bar = Bar(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task(
            f"{self.label} epoch {done + 1}/{epochs}", total=epochs * steps, completed=done * steps
        )
        self.bar.start()

    def step(self) -> None:
        if self.bar is not None:
            self.bar.advance(self.task)

    def epoch(self, record: dict[str, Any]) -> None:
        if self.quiet:
            return
        line = summary(record, self.epochs)
        if self.bar is None:
            print(f"{self.label} {line}".strip(), file=sys.stderr, flush=True)
        else:
            self.bar.console.print(f"{self.label} {line}".strip(), highlight=False)
            self.bar.update(
                self.task, description=f"{self.label} epoch {min(record['epoch'] + 2, self.epochs)}/{self.epochs}"
            )

    def say(self, message: str) -> None:
        """What a person must know, quiet or not."""
        print(message, file=sys.stderr, flush=True)


def summary(record: dict[str, Any], epochs: int) -> str:
    """epoch 3/15  loss 1.204 (sup 0.51, m 0.11, cr 0.14)  val 84.31 %  sets corrected 120 (now 7)  12 s"""
    known = ("epoch", "loss", "lr", "flops", "seconds", "once_per_epoch", "corrected_now")
    fixed = (
        "val_accuracy",
        "val_covering",
        "val_approximated",
        "val_likelihood",
        "corrected",
        "corrected_precision",
        "true_in_set_before",
        "true_in_set_after",
        "label_accuracy",
    )
    terms = ", ".join(f"{k} {v:.3f}" for k, v in record.items() if k not in known + fixed and not k.startswith("em_"))
    parts = [f"epoch {record['epoch'] + 1:>3}/{epochs}", f"loss {record['loss']:.3f} ({terms})"]
    if record["val_accuracy"] is not None:
        parts.append(f"val {record['val_accuracy']:.2%}")
    if "val_covering" in record:
        parts.append(f"held-out sets hold {record['val_covering']:.2%}")
    if "corrected_now" in record:
        parts.append(f"sets corrected {record['corrected']} (+{record['corrected_now']})")
    return "  ".join([*parts, f"{record['seconds']:.0f} s"])


@contextlib.contextmanager
def bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A plain bar on a terminal; gives a function that moves it on by so many."""
    if quiet or not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda n: shown.advance(task, n)


def clock(seconds: float) -> str:
    """12 s, 3:20 min, 2:05 h, 3.4 days"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f} min"
    return (
        f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
        if seconds < 48 * 3600
        else f"{seconds / 86400:.1f} days"
    )
