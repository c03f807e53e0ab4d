"""Pictures, for people who would rather look than read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from urrl.files import write_atomic


def draw_curves(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """Accuracy, losses by term, and what became of the candidate sets, over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs = [record["epoch"] + 1 for record in history]

    def series(name: str) -> list[float]:
        return [float("nan") if record.get(name) is None else record[name] for record in history]

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    figure.suptitle(title)
    left.plot(epochs, series("val_accuracy"), label="validation accuracy")
    if "val_covering" in history[-1]:
        left.plot(epochs, series("val_covering"), label="held-out sets that hold the prediction")
    left.plot(epochs, series("label_accuracy"), label="training items with the right label (argmax l)")
    left.set(xlabel="epoch", title="accuracy")
    shares = ("true_in_set_after", "corrected_precision", "val_accuracy", "label_accuracy", "true_in_set_before")
    of_sets = ("val_covering", "val_approximated", "val_likelihood")
    known = ("epoch", "lr", "flops", "seconds", "once_per_epoch", "corrected", "corrected_now", *shares, *of_sets)
    for name in (key for key in history[-1] if key not in known and not key.startswith("em_")):
        middle.plot(epochs, series(name), label=name)
    middle.set(xlabel="epoch", title="loss and its terms", yscale="log")
    right.plot(epochs, series("true_in_set_after"), label="sets that hold the true label")
    right.plot(epochs, series("true_in_set_before"), "--", color="grey", label="... as they came")
    right.plot(epochs, series("corrected_precision"), label="corrections that are right")
    right.set(xlabel="epoch", title="candidate sets")
    for axes in (left, middle, right):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    write_atomic(path, lambda file: file.write(buffer.getvalue()))
