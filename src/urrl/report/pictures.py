"""Runs -> pictures, as data: URIs for a page that needs nothing else."""

from __future__ import annotations

import base64
import io
import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urrl.errors import UserError
from urrl.report.figures import Figure, Table, ablation_rows, phi_rows, rates_text
from urrl.report.runs import Entry, groups, label, rank


@dataclass(frozen=True)
class Picture:
    title: str
    source: str  # data: URI
    note: str = ""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "urrl", "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "grid.alpha": 0.25, "font.size": 9, "legend.frameon": False})  # fmt: skip
    return plt


def _source(plt: Any, drawn: Any, kind: str = "svg") -> str:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    plt.close(drawn)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def plain(text: str) -> str:
    """For matplotlib, which takes $ for mathematics."""
    return text.replace("$", r"\$")


def series(entries: list[Entry], key: str) -> tuple[list[int], list[float]]:
    """(epochs from 1, the mean over the seeds), at the epochs at which all of them know it."""
    columns = [[record.get(key) for record in e.history] for e in entries if e.history and key in e.history[-1]]
    rows = list(enumerate(zip(*columns), 1))
    known = [(epoch, statistics.fmean(row)) for epoch, row in rows if None not in row]
    return [epoch for epoch, _ in known], [mean for _, mean in known]


def _panels(plt: Any, n: int, width: float = 3.6, height: float = 2.7) -> tuple[Any, list[Any]]:
    columns = min(3, n)
    rows = math.ceil(n / columns)
    drawn, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                               constrained_layout=True)  # fmt: skip
    flat = list(axes.flat)
    for panel in flat:
        panel.xaxis.get_major_locator().set_params(integer=True)  # epochs
    for spare in flat[n:]:
        spare.axis("off")
    return drawn, flat[:n]


def _legend(drawn: Any, axes: list[Any]) -> None:
    """One for all panels."""
    handles = {text: handle for a in axes for handle, text in zip(*a.get_legend_handles_labels())}
    if handles:
        wide = 12 * drawn.get_figwidth() // (max(map(len, handles)) + 6)  # that many stand beside one another
        columns = int(max(1, min(7, len(handles), wide)))
        drawn.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def curves(entries: list[Entry]) -> Picture | None:
    plt = _pyplot()
    some = sorted((e for e in entries if e.history and not e.study), key=rank)
    some = [e for e in some if e.history[-1].get("val_accuracy") is not None]
    if not some:
        return None
    by_rates = dict(sorted(groups(some, lambda e: e.rates).items()))
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(label(e.config) for e in some))}
    drawn, axes = _panels(plt, len(by_rates))
    for panel, (rates, here) in zip(axes, by_rates.items()):
        for name, same in groups(here, lambda e: label(e.config)).items():
            x, y = series(same, "val_accuracy")
            panel.plot(x, [100 * v for v in y], label=plain(name), color=colours[name],
                       lw=2 if name.startswith("URRL") else 1.1, marker="." if len(x) == 1 else None)  # fmt: skip
        panel.set(title=rates_text(rates), xlabel="epoch", ylabel="validation accuracy, %")
    _legend(drawn, axes)
    return Picture("Accuracy over the epochs", _source(plt, drawn), "Mean over the seeds.")


def over_epochs(
    entries: list[Entry], title: str, quantities: dict[str, tuple[str, float]], note: str
) -> Picture | None:
    """A row of panels for each method that has the quantities (key -> axis, factor), a line for each cell."""
    plt = _pyplot()
    some = sorted((e for e in entries if e.history and not e.study), key=rank)
    some = [e for e in some if all(e.history[-1].get(key) is not None for key in quantities)]
    by_label = groups(some, lambda e: label(e.config))
    if not by_label:
        return None
    drawn, axes = _panels(plt, len(by_label) * len(quantities))
    for (name, same), (key, (axis, factor)), panel in (
        (*pair, panel) for pair, panel in zip(itertools.product(by_label.items(), quantities.items()), axes)
    ):
        cells = sorted(groups(same, lambda e: e.rates).items())
        for i, (rates, here) in enumerate(cells):
            x, y = series(here, key)
            panel.plot(x, [factor * v for v in y], label=rates_text(rates), color=plt.cm.viridis(i / len(cells)),
                       marker="." if len(x) == 1 else None)  # fmt: skip
        panel.set(title=plain(name), xlabel="epoch", ylabel=axis)
    _legend(drawn, axes)
    return Picture(title, _source(plt, drawn), note)


def cost_picture(table: Table) -> Picture | None:
    points = [(row[0].text, row[1].value, row[2].value) for row in table.rows if row[1].value is not None]
    if len(points) < 2:
        return None
    plt = _pyplot()
    drawn, panel = plt.subplots(figsize=(6.4, 3.8), constrained_layout=True)
    for i, (name, accuracy, flops) in enumerate(points):
        panel.plot([flops], [accuracy], "o", color=f"C{i % 10}", label=plain(name))
    panel.set(xlabel="FLOPs of the training", ylabel="test accuracy, %")
    drawn.legend(loc="outside right upper")
    return Picture("Accuracy against cost", _source(plt, drawn))


def study_picture(some: list[Entry], kind: str) -> Picture:
    plt = _pyplot()
    drawn, panel = plt.subplots(figsize=(6.4, 3.2), constrained_layout=True)
    rows: list[tuple[Any, Figure]] = list(ablation_rows(some) if kind == "ablation" else phi_rows(some))
    names = [row.name if kind == "ablation" else f"{row:g}" for row, _ in rows]
    for shift, what, values in (
        (-0.2, "ours", [(f.mean, f.std) for _, f in rows]),
        (0.2, "the paper's", [f.printed or (None, None) for _, f in rows]),
    ):
        known = [
            (i, mean, math.nan if std is None else std) for i, (mean, std) in enumerate(values) if mean is not None
        ]
        if not known:
            continue
        x, y, spread = zip(*known)
        if kind == "ablation":
            panel.bar([i + shift for i in x], y, 0.38, yerr=spread, capsize=3, label=what)
        else:
            panel.errorbar(x, y, yerr=spread, capsize=3, marker="o", label=what)
    panel.set_xticks(range(len(names)), [name.replace(" & ", "\n& ") for name in names])
    panel.set(ylabel="test accuracy, %", xlabel="" if kind == "ablation" else "φ")
    heights = [v for _, f in rows for v in (f.mean, f.printed and f.printed.mean) if v is not None]
    if kind == "ablation" and heights:
        panel.set_ylim(max(0, min(heights) - 10), min(100, max(heights) + 5))
    panel.legend()
    return Picture("", _source(plt, drawn))


def tsne_picture(entries: list[Entry], data_dir: Path | None, points: int = 10_000) -> Picture:
    """The test items as each method's encoder sees them: the same items, coloured by their true class."""
    try:
        from openTSNE import TSNE
    except ImportError:
        raise UserError("the t-SNE panels take openTSNE: pip install 'urrl[tsne]'") from None
    import torch

    from urrl.data import load, split
    from urrl.evaluate import labelled_features
    from urrl.predict import load_model

    plt = _pyplot()
    entries = sorted((e for e in entries if e.result), key=rank)
    drawn, axes = _panels(plt, len(entries), 3.2, 3.2)
    shown = 0
    for panel, entry in zip(axes, entries):
        c = entry.config
        net, _, policy, _, _ = load_model(entry.folder)
        test = split(load(c["dataset"], data_dir), c["split"], c["seed"]).test
        features, y = labelled_features(net, test, policy, points)
        shown = len(y)
        place = TSNE(random_state=0, n_jobs=torch.get_num_threads()).fit(features.numpy())
        panel.scatter(place[:, 0], place[:, 1], c=y.numpy(), cmap="tab10" if int(y.max()) < 10 else "hsv", s=2, lw=0)
        panel.set(title=plain(label(c)), xticks=[], yticks=[])
        panel.grid(False)
    note = f"The encoder's features of {shown} test items by openTSNE; the same items, coloured by their true class."
    return Picture("t-SNE", _source(plt, drawn, "png"), note)
