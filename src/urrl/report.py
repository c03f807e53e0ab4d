"""Runs -> tables beside the paper's, and pictures: one HTML page that needs nothing else, and the tables as Markdown,
CSV and LaTeX. Whatever is below a folder is reported: runs of `urrl bench` and of `urrl train --out` alike."""

from __future__ import annotations

import argparse
import base64
import csv
import io
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import urrl
from urrl import paper
from urrl.errors import UserError
from urrl.files import read_json, write_text
from urrl.progress import clock
from urrl.tables import protect
from urrl.train import read_history

T = TypeVar("T")

NAMES = {
    "urrl": "URRL", "proden": "PRODEN", "rc": "RC", "cc": "CC", "rabs": "RABS", "pico": "PiCO", "pico_plus": "PiCO+",
    "cr_dpll": "CR-DPLL", "alim": "ALIM", "irnet": "IRNet", "average": "average (lower bound)",
    "supervised": "supervised (upper bound)",
}  # fmt: skip
ORDER = [*paper.METHODS, *(name for name in NAMES if name not in paper.METHODS)]
PARTS = ("use_m", "use_cr", "use_correction")  # what the ablation takes away


@dataclass(frozen=True)
class Entry:
    """A run: finished, failed, begun or only planned."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None = None
    error: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    study: bool = False  # there for the ablation or for phi only
    pictured: bool = False  # there for the t-SNE figure

    @property
    def setting(self) -> tuple[Any, ...]:
        """What the runs of one table have in common."""
        c, t = self.config, self.config["training"]
        split = c["split"].partition(":")[0]  # the folds are repetitions
        data = (c.get("data_sha256") or "")[:6]  # a user's own
        lr = t["lr"] if t["net"] == "mlp" and t["lr"] != usual(c).get("lr", t["lr"]) else None  # else in `variant`
        return (c["dataset"], c["recipe"], t["net"], t["width"], t["epochs"], t["batch_size"], lr, c["subset"],
                c["convention"], split, data)  # fmt: skip

    @property
    def rates(self) -> tuple[float, float]:
        """(eta, mu), -1 where nobody knows: of sets that came with the data."""
        eta, mu = (-1.0 if self.config[rate] is None else self.config[rate] for rate in ("eta", "mu"))
        return eta, mu

    @property
    def repetition(self) -> tuple[int, str]:
        return (self.config["seed"], self.config["split"])

    @property
    def accuracy(self) -> float | None:
        known = None if self.result is None else self.result.get("test_accuracy")
        return None if known is None else 100 * known


@dataclass(frozen=True)
class Cell:
    """Of a table, however it is written. `value` sorts, `aside` is what stands beside it in small print."""

    text: str
    value: float | str | None = None
    aside: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    title: str
    source: str  # data: URI
    note: str = ""


# ---- reading ---------------------------------------------------------------------------------------------


def find_runs(root: Path) -> list[Entry]:
    """Every run below the folder, and every cell that a grid there has planned."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    found: dict[Path, Entry] = {}
    problems: list[str] = []
    for path in sorted(root.rglob("config.json")):
        try:
            config = read_json(path)
        except UserError as error:
            problems.append(f"{error}; the run is left out")
            continue
        if {"dataset", "method", "training", "options"} <= config.keys():
            found[path.parent] = _entry(path.parent, config)
    for path in sorted(root.rglob("grids/*.json")):
        plan = _whole(partial(read_json, path), "what was planned is left out") or {"grid": "", "cells": []}
        for cell in plan["cells"]:
            folder = path.parents[1] / cell.pop("folder")
            if folder not in found:
                found[folder] = _entry(folder, cell)
            if plan["grid"] == "paper:tsne":
                found[folder] = replace(found[folder], pictured=True)
    if not found:
        raise UserError(problems[0] if problems else f"{root}: no run below this folder (no config.json)")
    for problem in problems:
        _say(problem)
    entries = []
    for same in groups(found.values(), lambda e: (e.setting, e.rates)).values():
        several = len({label(e.config) for e in same if is_study(e.config)}) > 1  # one alone is compared with nothing
        entries += [replace(e, study=several and is_study(e.config)) for e in same]
    return sorted(entries, key=lambda e: e.folder)


def _entry(folder: Path, config: dict[str, Any]) -> Entry:
    result = error = None
    if (folder / "result.json").exists():
        result = _whole(partial(read_json, folder / "result.json"), "the run counts as not done")
    if (folder / "error.json").exists():
        told = _whole(partial(read_json, folder / "error.json"), "why the run failed is not known")
        error = told["error"] if told else "not known: error.json is damaged"
    history = _whole(partial(read_history, folder, _say), "its epochs are left out")
    return Entry(folder, config, result, error, history or [])


def _whole(read: Callable[[], T], otherwise: str) -> T | None:
    """What is read, or None and a word about it where the file is damaged."""
    try:
        return read()
    except UserError as problem:
        _say(f"{problem}; {otherwise}")
        return None


def _say(line: str) -> None:
    print(f"urrl: {line}", file=sys.stderr)


def by_its_size(config: dict[str, Any]) -> bool:
    """Whether the number and the shape of the items decided over settings."""
    return config.get("data_sha256") is not None or config["training"]["net"] == "mlp"


def usual(config: dict[str, Any]) -> dict[str, Any]:
    """What the recipe sets for the method; of few feature vectors, where sizes decide."""
    from urrl.config import RECIPES, by_size

    values = RECIPES[config["recipe"]](config["dataset"], config["method"]) if config["recipe"] in RECIPES else {}
    return values | (by_size(2, (1,), config["method"]) if by_its_size(config) and config["recipe"] == "fast" else {})


def variant(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name of the method, what is set otherwise than in its recipe); for URRL, than in the paper's form where that is
    shorter to say."""
    from urrl.bench import paper_form
    from urrl.config import RECIPES, Training, build
    from urrl.methods import METHODS

    method, recipe = config["method"], RECIPES.get(config["recipe"])
    name = NAMES.get(method, method)
    if method not in METHODS or recipe is None:
        return name, {}
    values = recipe(config["dataset"], method)
    own = dict(vars(build(METHODS[method].Config, {k: v for k, v in values.items() if k in config["options"]})))
    training = vars(build(Training, {k: v for k, v in values.items() if k not in config["options"]}))
    told = ("net", "width", "epochs", "batch_size")  # in the title
    also = {k: v for k, v in config["training"].items() if k not in told and training.get(k, v) != v}
    if by_its_size(config):
        also = {}
        own |= {k: v for k, v in config["options"].items() if usual(config).get(k) == v}
    differs = {k: v for k, v in config["options"].items() if own.get(k, v) != v}
    if method == "urrl":
        printed = paper_form(config["dataset"])
        from_printed = {k: v for k, v in config["options"].items() if printed.get(k, v) != v}
        if len(from_printed) < len(differs):
            return f"{name}, paper's form", from_printed | also
    return name, differs | also


def label(config: dict[str, Any]) -> str:
    name, differs = variant(config)
    return " ".join([name, *(f"{k}={json.dumps(v)}" for k, v in differs.items())])


def is_study(config: dict[str, Any]) -> bool:
    """Whether the run differs from others in a part of URRL or in phi alone."""
    own = variant(config)[1].keys() & config["options"].keys()
    return config["method"] == "urrl" and bool(own) and own <= {*PARTS, "phi"}


def _rank(entry: Entry) -> tuple[int, str]:
    method = entry.config["method"]
    return (ORDER.index(method) if method in ORDER else len(ORDER), label(entry.config))


def groups(entries: Iterable[Entry], key: Any) -> dict[Any, list[Entry]]:
    made: dict[Any, list[Entry]] = {}
    for entry in entries:
        made.setdefault(key(entry), []).append(entry)
    return made


# ---- figures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Accuracy over the seeds, beside the paper's."""

    by_seed: dict[Any, float]
    planned: int
    failed: bool
    printed: paper.Value | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.printed is None else self.mean - self.printed.mean

    def cell(self, best: bool = False) -> Cell:
        beside = []
        if self.mean is not None and len(self.by_seed) < self.planned:
            beside.append(f"{len(self.by_seed)} of {self.planned} seeds")
        if self.printed:
            beside.append(f"paper {with_std(*self.printed)}")
        if self.difference is not None:
            beside.append(signed(self.difference))
        if self.mean is None:
            return Cell("failed" if self.failed else "missing", None, ", ".join(beside))
        return Cell(with_std(self.mean, self.std), self.mean, ", ".join(beside), best)


def figure(entries: list[Entry], printed: paper.Value | None = None) -> Figure:
    known = {e.repetition: e.accuracy for e in entries if e.accuracy is not None}
    return Figure(known, len({e.repetition for e in entries}), any(e.error for e in entries), printed)


def with_std(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def signed(difference: float) -> str:
    return f"{difference:+.2f}".replace("-", "−")


def printed_value(entry: Entry) -> paper.Value | None:
    """What the paper reports of this method in this cell."""
    c = entry.config
    if (c["convention"], c["split"]) != ("paper", "paper") or is_study(c):
        return None
    return paper.ACCURACY.get(c["dataset"], {}).get(entry.rates, {}).get(c["method"])


def setting_title(setting: tuple[Any, ...]) -> str:
    dataset, recipe, net, width, epochs, batch, lr, subset, convention, split, data = setting
    parts = [dataset, f"recipe {recipe} ({net} {width})", f"{epochs} epochs"]
    parts += [f"batches of {batch}"] + ([f"lr {lr:g}"] if lr is not None else [])
    parts += [f"data {data}"] if data else []
    parts += [f"{subset} items"] if subset else []
    parts += [f"sets {convention}"] if convention not in ("paper", None) else []
    parts += [f"split {split}"] if split != "paper" else []
    return ", ".join(parts)


def rates_text(rates: tuple[float, float]) -> str:
    known = [f"{name} {rate:g}" for name, rate in zip("ημ", rates) if rate >= 0]
    return ", ".join(known) or "sets as they came"


Grid = dict[tuple[float, float], dict[str, Figure]]  # (eta, mu) -> label -> figure


def accuracy_grid(entries: list[Entry]) -> Grid:
    """Of one setting, the studies left out; what nobody has planned is missing as well."""
    entries = sorted((e for e in entries if not e.study), key=_rank)
    rows = sorted({e.rates for e in entries})
    grid: Grid = {row: {} for row in rows}
    for name, same in groups(entries, lambda e: label(e.config)).items():
        by_row = groups(same, lambda e: e.rates)
        for row in rows:
            some = by_row.get(row, [])
            grid[row][name] = figure(some, printed_value(some[0]) if some else None)
    return grid


def best_of(row: dict[str, Figure]) -> str | None:
    """The bounds are no competitors."""
    known = {name: f.mean for name, f in row.items() if f.mean is not None and "bound)" not in name}
    return max(known, key=lambda name: known[name]) if len(known) > 1 else None


def accuracy_table(grid: Grid) -> Table:
    names = list(next(iter(grid.values())))
    rows = []
    for (eta, mu), row in grid.items():
        best = best_of(row)
        rates = [Cell("–") if rate < 0 else Cell(f"{rate:g}", rate) for rate in (eta, mu)]
        rows.append([*rates, *(row[name].cell(name == best) for name in names)])
    return Table(
        "Test accuracy in percent",
        ["η", "μ", *names],
        rows,
        "Mean ± standard deviation over the seeds, best in bold; then the paper's value and ours minus it. Here the "
        "compared methods run as their own authors meant them, which the paper did not always do: see docs/methods.md.",
    )


def significance_table(grid: Grid) -> Table | None:
    """The best of a row against each other, paired over the seeds."""
    from scipy.stats import ttest_rel

    rows = []
    for rates, row in grid.items():
        if (best := best_of(row)) is None:
            continue
        for name, other in row.items():
            seeds = sorted(row[best].by_seed.keys() & other.by_seed.keys())
            if name == best or "bound)" in name or len(seeds) < 3:
                continue
            a, b = ([f.by_seed[s] for s in seeds] for f in (row[best], other))
            gap = statistics.fmean(a) - statistics.fmean(b)
            constant = len({round(x - y, 9) for x, y in zip(a, b)}) == 1  # the test has no spread to go by
            p = math.nan if constant else float(ttest_rel(a, b).pvalue)
            rows.append([Cell(rates_text(rates)), Cell(best), Cell(name), Cell(signed(gap), gap),
                         Cell("–" if math.isnan(p) else f"{p:.3g}", None if math.isnan(p) else p, "", p < 0.05),
                         Cell(str(len(seeds)), len(seeds))])  # fmt: skip
    header = ["cell", "best", "against", "difference", "p", "seeds"]
    note = "Paired t-test over the common seeds, two-sided; p below 0.05 in bold, not corrected for many comparisons."
    return Table("Is the best better by more than chance?", header, rows, note) if rows else None


def cost_table(entries: list[Entry]) -> Table | None:
    """Over the cells that every method has finished."""
    finished = sorted((e for e in entries if e.result and not e.study), key=_rank)
    by_label = groups(finished, lambda e: label(e.config))
    if not by_label:
        return None
    common = set.intersection(*({(*e.rates, *e.repetition) for e in some} for some in by_label.values()))
    rows = []
    for name, some in by_label.items():
        shared = [e for e in some if (*e.rates, *e.repetition) in common] or some
        results = [e.result for e in shared if e.result]
        accuracies = [e.accuracy for e in shared if e.accuracy is not None]
        accuracy = statistics.fmean(accuracies) if accuracies else None
        flops, seconds, rate = (statistics.fmean(r[key] for r in results)
                                for key in ("train_flops", "seconds", "samples_per_second"))  # fmt: skip
        shown = "–" if accuracy is None else f"{accuracy:.2f}"
        rows.append([Cell(name), Cell(shown, accuracy), Cell(f"{flops:.3g}", flops), Cell(clock(seconds), seconds),
                     Cell(f"{rate:.0f}", rate), Cell(str(len(results)), len(results))])  # fmt: skip
    note = "Means over the runs that all methods of the table have finished. Runs side by side slow each other down."
    return Table("Cost", ["method", "accuracy", "FLOPs", "time", "items a second", "runs"], rows, note)


def studies(entries: list[Entry], keys: tuple[str, ...]) -> list[list[Entry]]:
    """Runs of URRL that differ in those options and the seed alone, where there is more than one choice of them."""

    def others(entry: Entry) -> str:
        rest = {k: v for k, v in entry.config["options"].items() if k not in keys}
        training = entry.config["training"]
        return json.dumps([entry.setting, entry.rates, rest, training, entry.config.get("sets_sha256")], sort_keys=True)

    urrl_runs = [e for e in entries if e.config["method"] == "urrl"]
    same = groups(urrl_runs, others).values()
    return [some for some in same if len({tuple(e.config["options"][k] for k in keys) for e in some}) > 1]


def ablation_rows(some: list[Entry]) -> list[tuple[paper.Ablation, Figure]]:
    rows = []
    for row in paper.ABLATION:
        runs = [e for e in some if tuple(e.config["options"][k] for k in PARTS) == row[1:4]]
        studied = paper.STUDIED.get(some[0].config["dataset"]) == some[0].rates
        rows.append((row, figure(runs, row.accuracy[some[0].config["dataset"]] if studied else None)))
    return rows


def phi_rows(some: list[Entry]) -> list[tuple[float, Figure]]:
    dataset, rates = some[0].config["dataset"], some[0].rates
    rows = []
    for phi, runs in sorted(groups(some, lambda e: e.config["options"]["phi"]).items()):
        studied = paper.STUDIED.get(dataset) == rates and phi in paper.PHI
        rows.append((phi, figure(runs, paper.PHI[phi][dataset] if studied else None)))
    return rows


def study_tables(some: list[Entry], kind: str) -> Table:
    title = f"{rates_text(some[0].rates)}: URRL's {'parts' if kind == 'ablation' else 'threshold φ'}"
    if kind == "ablation":
        rows = ablation_rows(some)
        marks = {True: Cell("✓", 1), False: Cell("–", 0)}
        top = max((f.mean for _, f in rows if f.mean is not None), default=None)
        body = [[Cell(row.name), *(marks[on] for on in row[1:4]), f.cell(f.mean is not None and f.mean == top)]
                for row, f in rows]  # fmt: skip
        return Table(title, ["", "L_m", "L_CR", "S-correction", "test accuracy"], body)
    values = phi_rows(some)
    top = max((f.mean for _, f in values if f.mean is not None), default=None)
    body = [[Cell(f"{phi:g}", phi), f.cell(f.mean is not None and f.mean == top)] for phi, f in values]
    return Table(title, ["φ", "test accuracy"], body)


# ---- pictures --------------------------------------------------------------------------------------------


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


def _series(entries: list[Entry], key: str) -> tuple[list[int], list[float]]:
    """The mean over the seeds, as far as all of them go."""
    columns = [[record[key] for record in e.history] for e in entries if e.history and key in e.history[-1]]
    columns = [[math.nan if v is None else v for v in column] for column in columns]
    length = min((len(column) for column in columns), default=0)
    return list(range(1, length + 1)), [statistics.fmean(c[i] for c in columns) for i in range(length)]


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
    some = sorted((e for e in entries if e.history and not e.study), key=_rank)
    some = [e for e in some if e.history[-1].get("val_accuracy") is not None]
    if not some:
        return None
    by_rates = dict(sorted(groups(some, lambda e: e.rates).items()))
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(label(e.config) for e in some))}
    drawn, axes = _panels(plt, len(by_rates))
    for panel, (rates, here) in zip(axes, by_rates.items()):
        for name, same in groups(here, lambda e: label(e.config)).items():
            x, y = _series(same, "val_accuracy")
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
    some = sorted((e for e in entries if e.history and not e.study), key=_rank)
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
            x, y = _series(here, key)
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
    entries = sorted((e for e in entries if e.result), key=_rank)
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


# ---- writing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    title: str
    parts: list[Table | Picture | str]


def sections(entries: list[Entry], data_dir: Path | None) -> list[Section]:
    made = []
    for setting, here in sorted(groups(entries, lambda e: e.setting).items(), key=lambda pair: str(pair[0])):
        parts: list[Table | Picture | str | None] = []
        grid = accuracy_grid(here)
        if grid:
            cost = cost_table(here)
            parts += [accuracy_table(grid), significance_table(grid), curves(here), cost, cost and cost_picture(cost)]
        for kind, keys in (("ablation", PARTS), ("phi", ("phi",))):
            for some in studies(here, keys):
                parts += [study_tables(some, kind), study_picture(some, kind)]
        corrected = [e for e in here if e.history and e.history[-1]["corrected"]]
        parts.append(over_epochs(
            corrected, "How the candidate sets grew",
            {"corrected": ("labels added", 1), "corrected_precision": ("of them right, %", 100),
             "true_in_set_after": ("sets with the true label, %", 100)},
            "A label that was added stays. Mean over the seeds.",
        ))  # fmt: skip
        parts.append(over_epochs(
            here, "The paper's EM reading",
            {"em_bound": ("bound of the likelihood", 1), "em_alignment": ("alignment term", 1),
             "em_compactness": ("compactness", 1)},
            "At the beginning of each epoch. The theory wants the first and the third to rise, the second to fall; but "
            "an untrained network puts all items close together, which counts as compact: the curves begin high.",
        ))  # fmt: skip
        made.append(Section(setting_title(setting), [part for part in parts if part]))
    if pictured := [e for e in entries if e.pictured and e.result]:
        try:
            made.append(Section("The encoders' features", [tsne_picture(pictured, data_dir)]))
        except UserError as error:  # the rest of the report does not depend on it
            made.append(Section("The encoders' features", [f"Not drawn: {error}"]))
    if failed := [e for e in entries if e.error]:
        rows = [[Cell(e.folder.name), Cell(str(e.error))] for e in failed]
        made.append(Section("What failed", [Table("", ["run", "error"], rows)]))
    return made


def markdown(made: list[Section], about: str) -> str:
    def safe(text: str) -> str:
        return re.sub(r"([\\`*_|#<>\[\]])", r"\\\1", text)

    def cell(c: Cell) -> str:
        shown = f"**{safe(c.text)}**" if c.bold else safe(c.text)
        return f"{shown} ({safe(c.aside)})" if c.aside else shown

    lines = ["# Report", "", safe(about)]
    for section in made:
        lines += ["", f"## {safe(section.title)}"]
        for table in (part for part in section.parts if isinstance(part, Table)):
            lines += ["", f"### {safe(table.title)}", ""] if table.title else [""]
            lines += ["| " + " | ".join(map(safe, table.header)) + " |", "|---" * len(table.header) + "|"]
            lines += ["| " + " | ".join(map(cell, row)) + " |" for row in table.rows]
            lines += ["", safe(table.note)] if table.note else []
    return "\n".join(lines) + "\n"


_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "η": r"$\eta$", "μ": r"$\mu$",
        "φ": r"$\phi$", "✓": r"$\checkmark$", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}  # fmt: skip


def latex(made: list[Section]) -> str:
    def safe(text: str) -> str:
        return "".join(_TEX.get(character, character) for character in text)

    def cell(c: Cell) -> str:
        shown = rf"\textbf{{{safe(c.text)}}}" if c.bold else safe(c.text)
        return rf"{shown} {{\scriptsize ({safe(c.aside)})}}" if c.aside else shown

    lines = [r"% \usepackage{amssymb} for the check marks"]
    for section in made:
        for table in (part for part in section.parts if isinstance(part, Table)):
            lines += [
                "",
                r"\begin{table}",
                r"\centering",
                rf"\begin{{tabular}}{{{'l' * len(table.header)}}}",
                r"\hline",
            ]
            lines += [" & ".join(map(safe, table.header)) + r" \\", r"\hline"]
            lines += [" & ".join(map(cell, row)) + r" \\" for row in table.rows]
            caption = ". ".join(filter(None, [section.title, table.title]))
            lines += [r"\hline", r"\end{tabular}", rf"\caption{{{safe(caption)}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def comma_separated(entries: list[Entry]) -> str:
    """One row for every method, variant and cell."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["setting", "dataset", "eta", "mu", "method", "variant", "seeds", "planned_seeds", "mean", "std",
                   "paper_mean", "paper_std", "difference", "train_flops", "seconds"])  # fmt: skip
    key = groups(sorted(entries, key=lambda e: (str(e.setting), e.rates, _rank(e))),
                 lambda e: (e.setting, e.rates, label(e.config)))  # fmt: skip
    for (setting, rates, name), same in key.items():
        c, f = same[0].config, figure(same, printed_value(same[0]))
        results = [e.result for e in same if e.result]
        flops, seconds = ((statistics.fmean(r[k] for r in results) if results else None)
                          for k in ("train_flops", "seconds"))  # fmt: skip
        row = [f.mean, f.std, *(f.printed or (None, None)), f.difference]
        known = [None if rate < 0 else rate for rate in rates]
        words = (protect(str(word)) for word in (setting_title(setting), c["dataset"], c["method"], name))
        title, dataset, method, shown = words
        rows.writerow([title, dataset, *known, method, shown, len(f.by_seed), f.planned,
                       *("" if v is None else f"{v:.4f}" for v in row), flops, seconds])  # fmt: skip
    return text.getvalue()


def web_page(made: list[Section], about: str, title: str) -> str:
    import jinja2

    template = resources.files("urrl").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.tests["table"] = lambda part: isinstance(part, Table)
    environment.tests["picture"] = lambda part: isinstance(part, Picture)
    return environment.from_string(template).render(sections=made, about=about, title=title, version=urrl.__version__)


def report(args: argparse.Namespace) -> None:
    """`urrl report`."""
    out: Path = args.out or args.folder / "report.html"
    if out.suffix != ".html":
        raise UserError(f"{out}: the report is a .html; the tables are written beside it")
    entries = find_runs(args.folder)
    made = sections(entries, args.data_dir)
    done, failed = sum(e.result is not None for e in entries), sum(e.error is not None for e in entries)
    about = f"{len(entries)} runs: {done} finished, {failed} failed, {len(entries) - done - failed} missing."
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out.with_suffix(".md"), markdown(made, about))
    write_text(out.with_suffix(".tex"), latex(made))
    write_text(out.with_suffix(".csv"), comma_separated(entries))
    write_text(out, web_page(made, about, args.folder.resolve().name))
    print(about)
    print(f"{out}   (and .md, .csv, .tex beside it)")
