"""Runs -> tables beside the paper's, and pictures: one HTML page that needs nothing else, and the tables as Markdown,
CSV and LaTeX. Whatever is below a folder is reported: runs of `urrl bench` and of `urrl train --out` alike."""

from __future__ import annotations

import argparse
import csv
import io
import re
import statistics
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import urrl
from urrl.errors import UserError
from urrl.files import write_text
from urrl.report.figures import (
    Cell,
    Table,
    accuracy_grid,
    accuracy_table,
    cost_table,
    figure,
    printed_value,
    setting_title,
    significance_table,
    studies,
    study_tables,
)  # fmt: skip
from urrl.report.pictures import Picture, cost_picture, curves, over_epochs, study_picture, tsne_picture
from urrl.report.runs import PARTS, Entry, find_runs, groups, label, rank
from urrl.tables import protect


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
    key = groups(sorted(entries, key=lambda e: (str(e.setting), e.rates, rank(e))),
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

    template = resources.files("urrl.report").joinpath("page.html").read_text(encoding="utf-8")
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
