"""The report: right numbers beside the paper's, whatever is missing, and a page that a real browser shows."""

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from tests.runs import TINY, call
from urrl import paper
from urrl.bench import Cell, make_cell, read_grid
from urrl.config import by_size, resolve
from urrl.files import write_json
from urrl.methods import METHODS
from urrl.report.pictures import series
from urrl.report.runs import find_runs

SEEDS = {"urrl": [92.0, 93.0, 94.0], "cc": [80.0, 82.0, 87.0], "supervised": [95.0, 95.5, 96.0]}


def fake(out, cell, accuracy=None, error=None, epochs=3):
    """A run's folder without the training."""
    folder = out / cell.name
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {**cell.run.to_dict(), "version": "0"})
    if error:
        write_json(folder / "error.json", {"error": error, "log": "x"})
    if accuracy is None:
        return folder
    records = [
        {"epoch": e, "loss": 1.0, "val_accuracy": accuracy / 100 - 0.1 / (e + 1), "corrected": 10 * e,
         "corrected_precision": 0.9 if e else None, "true_in_set_before": 0.8, "true_in_set_after": 0.8 + e / 100,
         "label_accuracy": 0.9,
         **({"em_bound": 5.0 + e, "em_alignment": -1.0 - e, "em_compactness": 0.5 + e / 10} if e != 1 else {})}
        for e in range(epochs)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    flops = {"urrl": 1e12, "cc": 3e12}.get(cell.run.method, 2e12)
    write_json(folder / "result.json", {"method": cell.run.method, "test_accuracy": accuracy / 100, "seconds": 100.0,
                                        "train_flops": flops, "samples_per_second": 500.0})  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One cell of the F-MNIST table with three seeds, another with holes, the studies, a plan with a missing run."""
    out = tmp_path_factory.mktemp("results") / "<i>runs"
    for cell in read_grid("paper:fmnist", {"method": list(SEEDS)}):
        if (cell.run.eta, cell.run.mu) == (0.3, 0.3):
            fake(out, cell, SEEDS[cell.run.method][cell.run.seed])
        elif (cell.run.eta, cell.run.mu, cell.run.method, cell.run.seed) == (0.5, 0.5, "urrl", 0):
            fake(out, cell, 88.0)
        elif (cell.run.eta, cell.run.mu, cell.run.method, cell.run.seed) == (0.5, 0.5, "cc", 0):
            fake(out, cell, error="Diverged: <b>nan</b> in epoch 2")
    for cell in read_grid("paper:ablation", {"dataset": ["cifar10"], "seed": [0, 1]}):
        o = cell.run.options
        fake(out, cell, 60.0 + 10 * o.use_m + 10 * o.use_cr + 10 * o.use_correction + cell.run.seed)
    for cell in read_grid("paper:phi", {"dataset": ["cifar10"], "seed": [0]}):
        if cell.run.options.phi in (0.5, 0.6):
            fake(out, cell, 50.0 + 10 * cell.run.options.phi)
    planned = make_cell({"dataset": "fmnist", "method": "rc", "eta": 0.3, "mu": 0.3}, {}, None)
    (out / "grids").mkdir()
    write_json(out / "grids" / "a.json", {"grid": "x", "cells": [{"folder": planned.name, **planned.run.to_dict()}]})
    done = call("report", out)
    assert done.code == 0, done.err
    return out


def rows(text, title):
    """Cells of the first Markdown table below a heading."""
    lines = text[text.index(title) :].splitlines()
    table = [line for line in lines[1:] if line.startswith("|") or not line]
    table = "\n".join(table).strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_accuracy_beside_the_paper_s(results):
    text = (results / "report.md").read_text()
    header, _, *body = rows(text[text.index("## fmnist") :], "### Test accuracy in percent")
    assert header == ["η", "μ", "URRL", "RC", "CC", "supervised (upper bound)"]
    table = {(row[0], row[1]): dict(zip(header[2:], row[2:])) for row in body}
    assert list(table) == [("0.3", "0.3"), ("0.5", "0.5")]
    full = table["0.3", "0.3"]
    assert full["URRL"] == "**93.00 ± 1.00** (paper 93.17 ± 0.19, −0.17)"
    assert full["CC"] == "83.00 ± 3.61 (paper 84.92 ± 1.00, −1.92)"
    assert full["supervised (upper bound)"] == "95.50 ± 0.50"  # higher, but no competitor
    assert full["RC"] == "missing (paper 84.53 ± 0.80)"
    holes = table["0.5", "0.5"]
    assert holes["URRL"] == "88.00 (paper 90.55 ± 0.35, −2.55)" and holes["CC"].startswith("failed")
    assert holes["supervised (upper bound)"] == "missing"
    assert "missing" in holes["RC"]


def test_curves_are_of_the_epochs_that_every_seed_knows(results):
    one = next(e for e in find_runs(results) if e.history)
    shorter = replace(one, history=one.history[:1])
    assert series([one], "em_bound") == ([1, 3], [5.0, 7.0])  # nobody looked at the second epoch
    assert series([one, shorter], "em_bound") == ([1], [5.0])
    assert series([one], "corrected_precision") == ([2, 3], [0.9, 0.9])
    assert series([one], "no such figure") == ([], [])


def test_csv(results):
    read = list(csv.DictReader((results / "report.csv").open()))
    (row,) = [r for r in read if (r["dataset"], r["eta"], r["method"]) == ("fmnist", "0.3", "cc")]
    assert (row["mean"], row["std"], row["seeds"]) == ("83.0000", "3.6056", "3")
    assert (row["paper_mean"], row["difference"]) == ("84.9200", "-1.9200")
    assert float(row["train_flops"]) == 3e12
    (row,) = [r for r in read if r["method"] == "rc"]
    assert (row["mean"], row["seeds"], row["planned_seeds"]) == ("", "0", "1")
    assert len([r for r in read if r["dataset"] == "cifar10"]) == 4 + 2  # every variant of the studies


def test_ablation_and_phi(results):
    text = (results / "report.md").read_text()
    _, _, *body = rows(text, "### η 0.3, μ 0.3: URRL's parts")
    assert [row[1:4] for row in body] == [["✓", "✓", "✓"], ["✓", "✓", "–"], ["✓", "–", "–"], ["–", "–", "–"]]
    assert [row[4] for row in body] == [
        "**90.50 ± 0.71** (paper 91.68 ± 0.45, −1.18)", "80.50 ± 0.71 (paper 88.96 ± 0.39, −8.46)",
        "70.50 ± 0.71 (paper 81.50 ± 0.59, −11.00)", "60.50 ± 0.71 (paper 75.65 ± 0.64, −15.15)"]  # fmt: skip
    _, _, *body = rows(text, "### η 0.3, μ 0.3: URRL's threshold φ")
    assert [row[0] for row in body] == ["0.5", "0.6", "0.7"]
    assert body[1][1] == "56.00 (paper 90.25 ± 0.54, −34.25)"
    assert body[2][1].startswith("**90.50 ± 0.71** (paper 91.68")


def test_significance_is_paired_over_seeds(results):
    text = (results / "report.md").read_text()
    _, _, *body = rows(text, "### Is the best better")
    assert len(body) == 1  # the other cell has too few seeds
    p = stats.ttest_1samp([a - b for a, b in zip(SEEDS["urrl"], SEEDS["cc"])], 0).pvalue
    assert body[0] == ["η 0.3, μ 0.3", "URRL", "CC", "+10.00", f"**{p:.3g}**" if p < 0.05 else f"{p:.3g}", "3"]


def test_cost_counts_what_all_have_finished(results):
    text = (results / "report.md").read_text()
    _, _, *body = rows(text[text.index("## fmnist") :], "### Cost")
    assert {row[0]: row[1:3] for row in body}["URRL"] == ["93.00", "1e+12"]  # without the cell that only URRL has
    assert all(row[-1] == "3" for row in body)


def test_the_page_needs_nothing_else_and_shows_names_as_text(results):
    page = (results / "report.html").read_text()
    assert not re.search(r"""(src|href)=(?!"data:|"#)""", page)
    assert "http" not in re.sub(r"data:[^\"]*", "", page)
    assert "&lt;i&gt;runs" in page and "<i>" not in page and "&lt;b&gt;nan&lt;/b&gt;" in page and "<b>nan" not in page
    for title in ("Accuracy over the epochs", "How the candidate sets grew", "The paper&#39;s EM reading", "Cost"):
        assert title in page
    assert page.count("<img") >= 6


def test_latex_and_markdown_escape(tmp_path):
    cell = read_grid("paper:fmnist", {"seed": [0], "method": ["urrl"]})[0]
    folder = fake(tmp_path, cell, 90.0)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "dataset": "a_b%&$x|<script>alert(1)</script>"})
    assert call("report", tmp_path).code == 0
    assert r"a\_b\%\&\$x|\textless{}script" in (tmp_path / "report.tex").read_text()
    assert r"a\_b%&$x\|\<script" in (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script>") == 1 and "a_b%&amp;$x|&lt;script&gt;alert(1)" in page


def test_the_same_runs_give_the_same_report(results):
    names = ["report.html", "report.md", "report.tex", "report.csv"]
    before = [(results / name).read_bytes() for name in names]
    assert call("report", results).code == 0
    assert [(results / name).read_bytes() for name in names] == before


def test_any_folder_with_runs(tmp_path):
    """Of `urrl train`, at any depth, finished or not; the page goes where it is asked for."""
    assert call(*TINY, "--out", tmp_path / "runs" / "deep" / "a").code == 0
    shutil.copytree(tmp_path / "runs" / "deep" / "a", tmp_path / "runs" / "b")
    (tmp_path / "runs" / "b" / "result.json").unlink()
    done = call("report", tmp_path / "runs", "--out", tmp_path / "page.html")
    assert done.code == 0 and "2 runs: 1 finished, 0 failed, 1 missing" in done.out
    assert (tmp_path / "page.html").exists() and not (tmp_path / "runs" / "report.html").exists()
    assert "phi=0.2" in (tmp_path / "page.html").read_text()  # what differs from the recipe is said


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: None, ["no such folder"]),
        (lambda d: d.mkdir(), ["no run below"]),
        (
            lambda d: (d / "a").mkdir(parents=True) or (d / "a" / "config.json").write_text("{"),
            ["config.json", "damaged"],
        ),
    ],
)
def test_bad_folders_are_refused(tmp_path, make, words):
    make(tmp_path / "x")
    done = call("report", tmp_path / "x")
    assert done.code == 2 and done.err.count("\n") == 1 and all(word in done.err for word in words)
    assert not (tmp_path / "x" / "report.html").exists()


def test_the_page_is_html(tmp_path):
    fake(tmp_path, read_grid("paper:fmnist", {})[0], 90.0)
    assert "is a .html" in call("report", tmp_path, "--out", tmp_path / "page.pdf").err


# ---- t-SNE -----------------------------------------------------------------------------------------------


@pytest.fixture
def encoders(tmp_path):
    cells = []
    for method in ("urrl", "proden"):
        assert call(*TINY[: TINY.index("--set")], "--method", method, "--out", tmp_path / method).code == 0
        cells.append({"folder": method, **json.loads((tmp_path / method / "config.json").read_text())})
    (tmp_path / "grids").mkdir()
    write_json(tmp_path / "grids" / "a.json", {"grid": "paper:tsne", "cells": cells})
    return tmp_path


def test_tsne_panels(encoders, monkeypatch):
    pytest.importorskip("openTSNE", reason="the extra `tsne` is not installed")
    assert call("report", encoders).code == 0
    page = (encoders / "report.html").read_text()
    assert "of 300 test items by openTSNE" in page and "data:image/png;base64," in page
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    assert call("report", encoders).code == 0  # without the extra the rest is there, and it is said
    page = (encoders / "report.html").read_text()
    assert "urrl[tsne]" in page and "data:image/png" not in page and "Test accuracy" in page


# ---- in a browser ----------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Clicks twice on every column of every table and writes down what it sees.
CLICKS = """
<script>
addEventListener("load", () => {
  const seen = [];
  document.querySelectorAll("table").forEach((table, number) => table.querySelectorAll("th button").forEach(button => {
    for (const turn of [0, 1]) {
      button.click();
      const column = button.parentElement.cellIndex;
      seen.push([number, column, button.parentElement.getAttribute("aria-sort"),
                 [...table.tBodies[0].rows].map(row => row.cells[column].firstChild.textContent)]);
    }
  }));
  const images = [...document.images].map(image => image.naturalWidth);
  document.body.append(Object.assign(document.createElement("pre"), {textContent: JSON.stringify({seen, images})}));
});
</script>
"""


def browse(page, *options):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-extensions", "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}",
               *options, page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")
def test_a_browser_opens_the_page_and_sorts_its_tables(results, tmp_path):
    page = tmp_path / "page.html"
    page.write_text((results / "report.html").read_text().replace("</body>", CLICKS + "</body>"))
    dom, console = browse(page, "--dump-dom")
    assert console == []
    found = json.loads(re.findall(r"<pre>(.*)</pre>", dom)[0].replace("&lt;", "<").replace("&amp;", "&"))
    assert len(found["images"]) >= 6 and min(found["images"]) > 100
    turns = {(table, column, way): values for table, column, way, values in found["seen"]}
    assert len(turns) == len(found["seen"]) and {way for _, _, way in turns} == {"ascending", "descending"}
    moved = 0
    for (table, column, way), values in turns.items():
        known = [v for v in values if v not in ("missing", "failed", "–")]
        if all(re.match(r"[+−]?[\d.e+]+( |$)", v) for v in known):
            numbers = [float(v.split()[0].replace("−", "-")) for v in known]
            assert numbers == sorted(numbers, reverse=way == "descending") and values[: len(known)] == known
        moved += way == "ascending" and values != turns[table, column, "descending"]
    assert moved > 10

    broken = tmp_path / "broken.html"  # the check can fail
    broken.write_text(page.read_text().replace('"use strict";', '"use strict"; nowhere();'))
    assert browse(broken, "--dump-dom")[1]


def test_paper_values_are_for_the_paper_s_conditions_only(tmp_path):
    assert paper.ACCURACY["fmnist"][0.3, 0.3]["urrl"].mean == 93.17
    for convention in ("paper", "swap"):
        cell = make_cell({"dataset": "fmnist", "eta": 0.3, "mu": 0.3, "convention": convention}, {}, None)
        fake(tmp_path, cell, 90.0)
    assert call("report", tmp_path).code == 0
    text = (tmp_path / "report.md").read_text()
    assert text.count("paper 93.17") == 1 and "sets swap" in text


def test_what_the_size_of_a_table_decides_is_no_variant(tmp_path):
    """The folds of all methods come into one table, although each method has its own learning rate."""
    wide: dict[str, Any] = {"head": "mlp", "weight_decay": 5e-4}  # no size decides over these
    for method, settings in (("urrl", {}), ("pico", {}), ("cc", {}), ("cc", {"lr": 0.01}), ("cc", wide)):
        for fold in range(2):
            cell = {"eta": None, "mu": None, "convention": None, "seed": 0, "split": f"fold:{fold}", "subset": None}
            base = by_size(1000, (100,), method)
            run = resolve("lost", method, "fast", METHODS[method].Config, settings, base, **cell)
            fake(tmp_path, Cell(run, {}), 60.0 + fold)
    assert call("report", tmp_path).code == 0
    text = (tmp_path / "report.md").read_text()
    tables = [rows(part, "### Test accuracy")[0] for part in text.split("\n## ")[1:]]
    other = 'CC head="mlp" weight\\_decay=0.0005'
    assert sorted(tables) == [["η", "μ", "CC"], ["η", "μ", "URRL", "PiCO", "CC", other]]
    assert text.count("60.50 ± 0.71") == 5


def test_a_damaged_file_costs_no_other_run(tmp_path):
    whole, torn, failed = (make_cell({"dataset": "digits", "method": m, "eta": 0.3, "mu": 0.3}, {}, None)
                           for m in ("urrl", "cc", "rc"))  # fmt: skip
    fake(tmp_path, whole, 90.0)
    (fake(tmp_path, torn, 80.0) / "metrics.jsonl").write_text("{\n")  # and there is no checkpoint to read it from
    (fake(tmp_path, failed, error="x") / "error.json").write_text("{")
    (tmp_path / "grids").mkdir()
    (tmp_path / "grids" / "a.json").write_text("[")
    write_json(tmp_path / "grids" / "b.json", {"a": 1})  # another program's
    folder = fake(tmp_path, make_cell({"dataset": "digits", "method": "cc", "eta": 0.1, "mu": 0.1}, {}, None), 1.0)
    write_json(folder / "result.json", json.loads((folder / "result.json").read_text()) | {"test_accuracy": None})
    done = call("report", tmp_path)
    assert done.code == 0
    for words in ("its epochs are left out", "why the run failed is not known", "what was planned is left out"):
        assert words in done.err
    text = (tmp_path / "report.md").read_text()
    assert "4 runs: 3 finished, 1 failed" in text and "90.00" in text and "80.00" in text
    assert "| unknown" in text  # nobody knows the truth there
