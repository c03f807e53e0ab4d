"""Runs -> tables: accuracy beside the paper's, significance, cost, ablation and phi."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from urrl import paper
from urrl.progress import clock
from urrl.report.runs import PARTS, Entry, groups, is_study, label, rank


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
class Figure:
    """Accuracy over the seeds, beside the paper's."""

    by_seed: dict[Any, float]
    planned: int
    failed: bool
    unknown: bool  # finished, on data of which nobody knows the truth
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
            why = "failed" if self.failed else "unknown" if self.unknown else "missing"
            return Cell(why, None, ", ".join(beside))
        return Cell(with_std(self.mean, self.std), self.mean, ", ".join(beside), best)


def figure(entries: list[Entry], printed: paper.Value | None = None) -> Figure:
    known = {e.repetition: e.accuracy for e in entries if e.accuracy is not None}
    failed, unknown = any(e.error for e in entries), any(e.result and e.accuracy is None for e in entries)
    return Figure(known, len({e.repetition for e in entries}), failed, unknown, printed)


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
    entries = sorted((e for e in entries if not e.study), key=rank)
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
    finished = sorted((e for e in entries if e.result and not e.study), key=rank)
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
