"""The audit: does it find the sets that miss the truth, say so in tables that load back, and on a page that works."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score

from tests.browser import dom_after, needs_browser
from tests.runs import call, tree
from tests.test_cli import assert_refused
from urrl.audit import Audit, audit_run, cleaned, confusions, label_issues, page, suspects, thumbnail
from urrl.candidates import CandidateSets, generate
from urrl.data import load, split
from urrl.nets import Out
from urrl.parse import parse_candidates
from urrl.tables import read_table, write_table


def blobs(n=400, C=4, seed=0):
    """(outputs of a good but soft network, l, given sets, true labels)."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    feature = torch.eye(C)[y].repeat(1, 3) + 0.3 * torch.randn(n, 3 * C, generator=rng)
    logits = 3 * feature[:, :C]
    S = generate(y, C, 0.2, 0.3, seed=seed).mask
    return Out(logits, torch.nn.functional.normalize(feature, dim=1), feature), logits.softmax(1), S, y


def test_worst_first_and_right():
    out, l, S, y = blobs()
    added = torch.full(S.shape, -1, dtype=torch.int16)
    added[:, 1] = 6
    issues = label_issues(out, l, S, "abcd", added=added)
    columns = "item given suggested evidence confidence epoch votes of neighbours"
    assert list(issues) == columns.split()
    assert issues["evidence"].is_monotonic_decreasing and sorted(issues["item"]) == list(range(400))
    missing = ~S[torch.arange(400), y].numpy()
    rows = issues.index.to_numpy()
    assert average_precision_score(missing[rows], issues["evidence"]) > 0.95
    assert missing[suspects(issues).index].mean() > 0.95
    for row, record in suspects(issues).iterrows():
        assert record["suggested"] not in record["given"]
        assert record["given"] == ["abcd"[c] for c in S[row].nonzero().squeeze(1)]
        assert (None if pd.isna(record["epoch"]) else record["epoch"]) == (7 if record["suggested"] == "b" else None)
        assert 0 < record["votes"] <= record["of"] == 25
        assert len(record["neighbours"]) == min(5, record["votes"]) and row not in record["neighbours"]
        assert all("abcd"[l[i].argmax()] == record["suggested"] for i in record["neighbours"])
    assert np.mean([s == "abcd"[y[row]] for row, s in suspects(issues)["suggested"].items()]) > 0.95


def test_confusions_count_the_suspects():
    issues = pd.DataFrame({"item": [1, 2, 3, 4], "given": [["a", "b"], ["b"], ["a"], ["a", "c"]],
                           "suggested": ["c", "c", "c", "c"], "evidence": [0.9, 0.8, 0.3, 0.1]})  # fmt: skip
    counted = {(r.missing, r.given): r.items for r in confusions(issues).itertuples()}
    assert counted == {("c", "b"): 2, ("c", "a"): 1}


def test_cleaned_keeps_the_set_where_the_run_cannot_tell():
    issues = pd.DataFrame(
        {"item": ["x", "y", "z"], "given": [["a", "b"], ["a", "b"], ["b"]], "suggested": ["c", "a", "c"],
         "confidence": [0.4, 0.4, 0.9]}, index=[2, 0, 1],
    )  # fmt: skip
    frame = cleaned(issues)
    assert frame["item"].tolist() == ["y", "z", "x"]
    assert frame["candidates"].tolist() == [["a", "b"], ["c"], ["a", "b", "c"]]


NAMES = ["=1+1", "'=2", "+x", "-1", "@me", "'quoted'", "plain", "ünïcødé", "two\nlines", 'a "b", c', "'''-3"]


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
def test_tables_come_back_as_they_were(form, tmp_path):
    frame = pd.DataFrame({"item": NAMES, "candidates": [[name] for name in NAMES], "p": np.linspace(0, 1, len(NAMES))})
    path = tmp_path / f"t.{form}"
    write_table(frame, path)
    back = read_table(path, lambda names: ["p"])
    assert back["item"].tolist() == NAMES
    assert [list(c) if not isinstance(c, str) else [c] for c in back["candidates"]] == [[name] for name in NAMES]
    assert back["p"].tolist() == pytest.approx(frame["p"].tolist())
    sets, names = parse_candidates(back["candidates"])
    assert sorted(names) == sorted(NAMES) and sets.mask.sum() == len(NAMES)
    if form == "csv":  # no cell is a formula to a spreadsheet
        cells = re.findall(r'(?:^|,|\n)"?([^",\n]*)', path.read_text())
        assert not [cell for cell in cells if cell[:1] in "=+-@" and cell]


def test_a_name_that_csv_cannot_hold_is_refused(tmp_path):
    frame = pd.DataFrame({"candidates": [["a|b", "c"]]})
    with pytest.raises(ValueError, match="parquet"):
        write_table(frame, tmp_path / "t.csv")
    write_table(frame, tmp_path / "t.parquet")
    assert list(read_table(tmp_path / "t.parquet")["candidates"].iloc[0]) == ["a|b", "c"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited") / "run"
    done = call("train", "--dataset", "digits", "--subset", 400, "--epochs", 15, "--set", "width=8", "--set",
                "batch_size=32", "--threads", 1, "--quiet", "--out", folder)  # fmt: skip
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
def test_audit_of_a_run(run, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("audit", run, "--out", "new/audit", "--format", form, "--threads", 1)
    assert (done.code, done.err) == (0, "") and "new/audit/index.html" in done.out
    files = f"cleaned.{form} confusions.{form} index.html issues.{form} summary.json"
    assert sorted(path.name for path in Path("new/audit").iterdir()) == files.split()
    issues = read_table(Path(f"new/audit/issues.{form}"), lambda names: ["evidence"])
    summary = json.loads(Path("new/audit/summary.json").read_text())
    assert summary["items"] == len(issues) == 400
    noise = summary["noise"]["missing"]
    assert 0 <= noise["low"] <= noise["value"] <= noise["high"] <= 1 and f"{noise['value']:.1%}" in done.out
    assert summary["suspects"] == (issues["evidence"] > 0.5).sum() > 20
    part = split(load("digits"), "paper", 0, 400).train
    truth = dict(zip(part.index.tolist(), part.truth.tolist()))
    back = read_table(Path(f"new/audit/cleaned.{form}"))
    sets, names = parse_candidates(back["candidates"])
    right = [names.index(str(truth[int(item)])) for item in back["item"]]
    given = CandidateSets.load(run / "candidates.npz").mask[torch.arange(400), part.truth].double().mean()
    assert sets.mask[torch.arange(400), right].double().mean() > given + 0.05
    assert sets.mean_size < 1.5

    before = tree(Path("new"))
    assert_refused(call("audit", run, "--out", "new/audit"), "new/audit")
    assert tree(Path("new")) == before


def test_audit_refuses_what_is_no_run(tmp_path):
    assert_refused(call("audit", tmp_path, "--out", tmp_path / "a"), "no finished run")
    assert not (tmp_path / "a").exists()


# ---- the page --------------------------------------------------------------------------------------------

EVIL = "<img src=x onerror=\"document.title='owned'\">"
CLOSE = "</script><script>document.title='owned'</script>"


def evil_page(tmp_path, images=True):
    out, l, S, _ = blobs(120)
    items = [f"{i} {EVIL}" if i % 2 else f"{i} {CLOSE}" for i in range(120)]
    classes = ["plain", EVIL, CLOSE, "ünï & co"]
    issues = label_issues(out, l, S, classes, items)
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (120, 3, 9, 9), generator=rng).to(torch.uint8) if images else torch.zeros(120, 5)
    summary = {"dataset": EVIL, "method": "urrl", "items": 120, "suspects": len(suspects(issues)), "missing": 0.2}
    path = tmp_path / "page.html"
    path.write_text(page(Audit(x, classes, issues, {}), summary))
    return path, suspects(issues)


class Table(HTMLParser):
    """The texts of the cells of the table of suspects, and the tags of the page."""

    def __init__(self, dom):
        super().__init__()
        self.rows, self.cell, self.inside, self.tags, self.title = [], None, False, [], ""
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = self.inside or (tag == "table" and dict(attrs).get("id") == "issues")
        if self.inside and tag == "tr":
            self.rows.append([])
        if self.inside and tag == "td":
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        if tag == "table":
            self.inside = False
        if tag == "td":
            self.cell = None

    def handle_data(self, text):
        if self.inside and self.cell:
            self.rows[-1][-1] += text
        if self.tags and self.tags[-1][0] == "title":
            self.title += text

    @property
    def body(self):
        return [row for row in self.rows if row]


@needs_browser
def test_the_page_in_a_browser(tmp_path):
    path, worst = evil_page(tmp_path)
    shown = Table(dom_after(path))
    assert shown.title.strip() == "Label audit"  # no name of an item or a class ran as a script
    assert [row[1] for row in shown.body] == worst["item"].tolist()
    assert [row[3] for row in shown.body] == worst["suggested"].tolist()
    pictures = [attrs for tag, attrs in shown.tags if tag == "img"]
    assert len(pictures) == len(worst) + worst["neighbours"].map(len).sum() and all(
        a["src"].startswith("data:image/png") for a in pictures
    )
    outside = [a for _, attrs in shown.tags for a in attrs.items() if a[0] in ("src", "href") and "data:" not in a[1]]
    assert not outside  # self-contained


ACTIONS = """
  const seen = {};
  const items = () => [...document.querySelectorAll('#issues tbody tr')].map(row => row.cells[at].textContent);
  const head = name => [...document.querySelectorAll('#issues th button')].find(b => b.textContent === name);
  const tick = () => document.getElementById('corrected').click();
  const put = (id, value) => {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event('input'));
  };
  head('confidence').click(); seen.down = items();
  head('confidence').click(); seen.up = items();
  head('evidence').click(); seen.first = items();
  put('suggested', '=plain'); seen.suggested = items(); put('suggested', '');
  put('given', '=plain'); seen.given = items(); put('given', '');
  put('least', '0.9'); seen.least = items(); put('least', '0');
  put('search', '7 <IMG'); seen.search = items(); put('search', '');
  tick(); seen.corrected = items(); tick();
  [...document.querySelectorAll('#matrix td button')].find(b => b.title.startsWith(cell)).click();
  seen.cell = items();
  const log = document.createElement('pre');
  log.id = 'log';
  log.textContent = JSON.stringify(seen);
  document.body.append(log);
"""


@needs_browser
@pytest.mark.parametrize("images", [True, False])
def test_sorting_and_filters_in_a_browser(tmp_path, images):
    path, worst = evil_page(tmp_path, images)
    at = 1 if images else 0

    pairs = {(s, g) for s, given in zip(worst["suggested"], worst["given"]) for g in given}
    missing, given = sorted(pairs, key=str)[0]
    cell = json.dumps(f"{missing} is missing where {given} is given").replace("<", "\\u003c")
    script = f"const at = {at}, cell = {cell};" + ACTIONS
    (log,) = re.findall('<pre id="log">(.*?)</pre>', dom_after(path, script), re.S)
    seen = json.loads(html.unescape(log))
    item, sure = worst["item"], worst["confidence"]
    assert seen["first"] == item.tolist()
    assert seen["down"] == item[sure.sort_values(ascending=False, kind="stable").index].tolist()
    assert seen["up"] == item[sure.sort_values(kind="stable").index].tolist()
    assert seen["suggested"] == item[worst["suggested"] == "plain"].tolist() != []
    assert seen["given"] == item[["plain" in g for g in worst["given"]]].tolist() != []
    assert seen["least"] == item[sure >= 0.9].tolist() != item.tolist()
    assert seen["search"] == [i for i in item if "7 <img" in i.lower()] != []
    assert seen["corrected"] == []  # none was
    assert (
        seen["cell"] == item[[s == missing and given in g for s, g in zip(worst["suggested"], worst["given"])]].tolist()
    )


def test_own_runs_audit_the_held_out_rows_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = load("digits")
    S = generate(dataset.truth[:300], 10, 0.2, 0.3).mask.numpy()
    np.savez("own.npz", x=dataset.x[:300, 0].numpy(), candidates=S, item=[f"digit {i}" for i in range(300)])
    done = call(
        "train", "--npz", "own.npz", "--epochs", 3, "--set", "width=4", "--threads", 1, "--quiet", "--out", "run"
    )
    assert done.code == 0, done.err
    found = audit_run(Path("run"), device="cpu")
    assert sorted(found.issues["item"]) == sorted(f"digit {i}" for i in range(300))
    row = found.issues.set_index("item").loc["digit 17"]
    assert row["given"] == S[17].nonzero()[0].tolist()
    np.savez("own.npz", x=dataset.x[1:301, 0].numpy(), candidates=S)
    assert_refused(call("audit", "run", "--out", "a"), "not what the run was trained on")


def test_odd_images_and_items_have_their_place(tmp_path):
    assert thumbnail(torch.zeros(5, 8, 8, dtype=torch.uint8)).startswith("data:image/png")
    write_table(pd.DataFrame({"item": ["a", 2, 3.5], "n": [1, 2, 3]}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet")["item"].tolist() == ["a", "2", "3.5"]
