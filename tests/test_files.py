"""The command line on a user's own files: images with a table, tables of features, .npz; and everything that is wrong
with such files in real life."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tests.runs import call
from tests.test_cli import assert_refused
from urrl.candidates import generate
from urrl.data import load
from urrl.data.files import items_to_predict, load_source
from urrl.data.own import as_items
from urrl.errors import UserError
from urrl.tables import read_table

TINY = ["--epochs", 2, "--set", "width=4", "--threads", 1, "--quiet"]
SETS = ["0|1", "1|2", "2", "", "0|2", "1"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def picture(path, seed=0, size=(12, 12), mode="L"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8)).save(path)


def folder_of_images(n=6, names=None, **options):
    """images/ and labels.csv with a row for each."""
    names = names or [f"{i}.png" for i in range(n)]
    for i, name in enumerate(names):
        picture(Path("images", name), i, **options)
    write_labels([(name, SETS[i % 6]) for i, name in enumerate(names)])


def write_labels(rows, header=("item", "candidates")):
    with open("labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


IMAGES = {"images": "images", "candidates": "labels.csv"}


def names_of(loaded):
    return [[loaded.dataset.classes[c] for c in row.nonzero().squeeze(1)] for row in loaded.dataset.S]


# ---- what is read ----------------------------------------------------------------------------------------


def test_images_with_a_table():
    folder_of_images(names=["0.png", "sub/1.png", "größe 2.png", "日本.png", "-4.png", "5.jpg"])
    loaded = load_source(IMAGES)
    assert loaded.items == ["0.png", "sub/1.png", "größe 2.png", "日本.png", "-4.png", "5.jpg"]
    assert loaded.dataset.classes == ("0", "1", "2") and loaded.dataset.y is None
    assert names_of(loaded)[:4] == [
        ["0", "1"],
        ["1", "2"],
        ["2"],
        ["0", "1", "2"],
    ]  # an empty set: no label, all classes
    assert loaded.dataset.x.shape == (6, 1, 12, 12)  # all of one small size: as they are
    assert torch.equal(loaded.dataset.x[0, 0], torch.from_numpy(np.array(Image.open("images/0.png"))))


def test_images_of_many_sizes_and_modes():
    folder_of_images(4, size=(70, 40))
    picture("images/1.png", mode="RGB", size=(33, 200))
    Image.fromarray((np.arange(6400, dtype=np.uint16) * 10).reshape(80, 80)).save("images/2.png")  # 16 bits
    Image.fromarray(np.eye(50, dtype=bool)).save("images/3.png")
    x = load_source(IMAGES).dataset.x
    assert x.shape == (4, 3, 32, 32)
    assert x[2].float().std() > 50 and int(x[2].max()) > 240  # not cut off at 255 of 65,535
    wide = as_items(["images/0.png"])
    assert wide.shape == (1, 1, 32, 32)


def test_annotators():
    folder_of_images(3)
    write_labels([("0.png", "ann", "cat"), ("1.png", "ann", "dog"), ("0.png", "bob", "lynx"), ("2.png", "bob", "dog")],
                 ("item", "annotator", "label"))  # fmt: skip
    assert names_of(load_source(IMAGES)) == [["cat", "lynx"], ["dog"], ["dog"]]


def table(n=30, d=3):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(n, d)).round(6), columns=[f"x{i}" for i in range(d)])
    return frame.assign(other=1.5, item=[f"r{i}" for i in range(n)], labels=[SETS[i % 6] for i in range(n)])


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
def test_tables(form):
    frame = table()
    {"csv": lambda: frame.to_csv("t.csv", index=False), "parquet": lambda: frame.to_parquet("t.parquet"),
     "json": lambda: frame.to_json("t.json", orient="records", double_precision=15)}[form]()  # fmt: skip
    loaded = load_source({"table": f"t.{form}", "features": "x*", "candidates": "labels"})
    assert loaded.features == ["x0", "x1", "x2"] and loaded.items == frame["item"].tolist()
    assert torch.allclose(loaded.dataset.x, torch.tensor(frame[["x0", "x1", "x2"]].to_numpy()))
    assert names_of(loaded)[1] == ["1", "2"]
    assert load_source({"table": f"t.{form}", "features": None, "candidates": "labels"}).dataset.x.shape == (30, 4)
    for features, word in (("x9", "x9"), ("labels", "labels")):
        with pytest.raises(UserError, match=word):
            load_source({"table": f"t.{form}", "features": features, "candidates": "labels"})
    with pytest.raises(UserError, match="no column 'sets'"):
        load_source({"table": f"t.{form}", "features": "x*", "candidates": "sets"})


def test_candidates_from_another_table():
    """As an audit writes them."""
    frame = table(6)
    frame.to_parquet("t.parquet")
    frame[["item", "labels"]].rename(columns={"labels": "candidates"})[::-1].to_csv("cleaned.csv", index=False)
    loaded = load_source({"table": "t.parquet", "features": "x*", "candidates": "cleaned.csv"})
    assert names_of(loaded) == names_of(load_source({"table": "t.parquet", "features": "x*", "candidates": "labels"}))
    np.savez("o.npz", x=np.eye(6), item=frame["item"].to_numpy(str))
    assert names_of(load_source({"npz": "o.npz", "candidates": "cleaned.csv"})) == names_of(loaded)
    frame.rename(columns={"labels": "candidates"})[1:].to_csv("cleaned.csv", index=False)
    with pytest.raises(UserError, match=r"t.parquet, row 0: the item 'r0' is not in cleaned.csv"):
        load_source({"table": "t.parquet", "features": "x*", "candidates": "cleaned.csv"})


def test_a_column_of_labels_is_no_feature_where_the_candidates_are_elsewhere():
    frame = table(6).assign(labels=[0, 1, 2, 0, 1, 2])
    frame.to_csv("t.csv", index=False)
    frame.rename(columns={"labels": "candidates"}).to_csv("cleaned.csv", index=False)
    with pytest.raises(UserError, match=r"t.csv: with the candidates in cleaned.csv, --features must say"):
        load_source({"table": "t.csv", "features": None, "candidates": "cleaned.csv"})
    frame.drop(columns="item").to_csv("t.csv")  # with pandas' row numbers, in a column without a name
    with pytest.raises(UserError, match=r"t.csv: a column has no name"):
        load_source({"table": "t.csv", "features": None, "candidates": "labels"})
    assert load_source({"table": "t.csv", "features": "x*", "candidates": "labels"}).dataset.x.shape == (6, 3)


def test_a_file_with_the_name_of_a_column_does_not_hide_it():
    table(20).to_csv("t.csv", index=False)
    Path("labels").write_text("anything")
    command = ["train", "--table", "t.csv", "--features", "x*", "--candidates", "labels", *TINY, "--out", "run"]
    assert call(*command).code == 0


def test_columns_are_found_by_their_names_again():
    """A name that looks like a pattern is none."""
    frame = pd.DataFrame({"x*": [0.0, 1.0, 2.0], "x1": [5.0, 6.0, 8.0]})
    frame[["x1", "x*"]].to_csv("new.csv", index=False)
    _, chunks = items_to_predict(Path("new.csv"), (2,), ["x*", "x1"], None)
    ((_, x),) = list(chunks)
    assert x.tolist() == frame.to_numpy().tolist()


def test_bad_rows_are_skipped_wherever_they_are():
    x = np.eye(6)
    x[3, 0], x[4, 1] = np.nan, 1e31
    np.savez("o.npz", x=x, candidates=["a", "b", "a", "b", "a", "b"], classes=["a", "b", "c"])
    note: list[str] = []
    total, chunks = items_to_predict(Path("o.npz"), (6,), None, note)
    assert total == 4 and [names for names, _ in chunks] == [[0, 1, 2, 5]]
    assert note == ["o.npz, row 3: feature 0 is no finite number", "o.npz, row 4: feature 1 is too large to be scaled"]
    with pytest.raises(UserError, match=r"o.npz, row 3: feature 0 is no finite number"):
        items_to_predict(Path("o.npz"), (6,), None, None)
    pd.DataFrame({"item": [0, 1, 2, 5], "candidates": ["a", "b", "a", "b"]}).to_csv("cleaned.csv", index=False)
    loaded = load_source({"npz": "o.npz", "candidates": "cleaned.csv", "skip_bad": True})
    assert loaded.items == [0, 1, 2, 5] and len(loaded.skipped) == 2
    assert loaded.dataset.classes == ("a", "b", "c")
    folder_of_images(3)
    rows = [("0.png", "me", "cat"), ("1.png", "me", ""), ("1.png", "you", "dog"), ("2.png", "me", "cat")]
    write_labels(rows, ("item", "annotator", "label"))
    with pytest.raises(UserError, match=r"labels.csv, line 3: the label is missing"):
        load_source(IMAGES)
    loaded = load_source(IMAGES | {"skip_bad": True})
    assert names_of(loaded) == [["cat"], ["dog"], ["cat"]] and len(loaded.skipped) == 1


def test_classes_that_are_numbers():
    np.savez("o.npz", x=np.eye(4), candidates=[3, 4, 3, 4])
    assert names_of(load_source({"npz": "o.npz", "classes": ["3", "4", "5"]})) == [[3], [4], [3], [4]]
    frames: dict[str, list[Any]] = {"lists": [[0, 1], [1], [2], [0]], "gaps": [0, 1, 2, None]}
    for name, column in frames.items():
        Path(f"{name}.json").write_text(json.dumps([{"u": i, "c": c} for i, c in enumerate(column)]))
        for classes in (["0", "1", "2"], None):
            loaded = load_source({"table": f"{name}.json", "features": "u", "candidates": "c", "classes": classes})
            assert [str(c) for c in loaded.dataset.classes] == ["0", "1", "2"] and names_of(loaded)[2] == [2]


def test_bad_images_are_found_before_they_are_streamed():
    folder_of_images()
    Path("images/2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"labels.csv, line 4: .*2.png: not an image"):
        load_source({**IMAGES, "stream": True})
    loaded = load_source({**IMAGES, "stream": True, "skip_bad": True})
    assert len(loaded.skipped) == 1 and len(loaded.items) == len(loaded.dataset.x) == 5


def test_labels_of_annotators_are_words():
    """A blank is none, "a|b" are two, and blanks around a word are not a part of it."""
    folder_of_images(2)
    write_labels([("0.png", "ann", "cat "), ("0.png", "bob", "dog|cat"), ("1.png", "ann", "dog")],
                 ("item", "annotator", "label"))  # fmt: skip
    assert names_of(load_source(IMAGES)) == [["cat", "dog"], ["dog"]]
    write_labels([("0.png", "ann", "cat"), ("1.png", "ann", " ")], ("item", "annotator", "label"))
    with pytest.raises(UserError, match="row 1: the label is missing"):
        load_source(IMAGES)


def test_lists_in_parquet():
    frame = table(4).assign(labels=[["a|b", "c"], ["c"], None, ["d"]])
    frame.to_parquet("t.parquet")
    loaded = load_source({"table": "t.parquet", "features": "x*", "candidates": "labels"})
    assert names_of(loaded) == [["a|b", "c"], ["c"], ["a|b", "c", "d"], ["d"]]


def test_npz():
    x = np.zeros((4, 9, 9, 3), np.uint8)
    mask = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0]], bool)
    np.savez("o.npz", x=x, candidates=mask, classes=["p", "q", "r"], item=list("abcd"))
    loaded = load_source({"npz": "o.npz"})
    assert names_of(loaded) == [["p", "r"], ["q"], ["r"], ["p"]] and loaded.items == list("abcd")
    assert loaded.dataset.x.shape == (4, 3, 9, 9)
    np.savez("o.npz", x=np.eye(3), candidates=["a|b", "b", "a"])
    assert names_of(load_source({"npz": "o.npz"})) == [["a", "b"], ["b"], ["a"]]


# ---- what is wrong ---------------------------------------------------------------------------------------


def truncated(path):
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])


BAD_IMAGES = {
    "truncated": (lambda: truncated("images/2.png"), ["labels.csv, line 4", "2.png", "not an image"]),
    "unreadable": (lambda: Path("images/2.png").write_text("no image"), ["labels.csv, line 4", "2.png"]),
    "missing": (lambda: Path("images/2.png").unlink(), ["labels.csv, line 4", "2.png: no such file"]),
    "twice": (lambda: append("1.png,2"), ["labels.csv, line 14", "'1.png'", "twice"]),
    "too few fields": (lambda: append("new.png"), ["labels.csv, line 14", "1 fields"]),
    "too many fields": (lambda: append("new.png,1,2"), ["labels.csv, line 14", "3 fields"]),
    "empty class": (lambda: append("new.png,1||2"), ["labels.csv, line 14", "'1||2'", "empty class"]),
}


def append(row):
    with open("labels.csv", "a", encoding="utf-8") as file:
        file.write(row + "\n")


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_bad_rows_are_named_or_skipped(case):
    folder_of_images(12)
    make_bad, words = BAD_IMAGES[case]
    make_bad()
    command = ["train", "--images", "images", "--candidates", "labels.csv", *TINY]
    assert_refused(call(*command, "--out", "run"), *words)
    assert not Path("run").exists()
    loaded = load_source(IMAGES | {"skip_bad": True})
    assert len(loaded.skipped) == 1 and all(word in loaded.skipped[0] for word in words)
    good = [f"{i}.png" for i in range(12) if words[0].endswith("14") or i != 2]
    assert loaded.items == good and len(loaded.dataset.x) == len(good)
    assert names_of(loaded)[-1] == ["1"]  # the sets stay with their items


def test_skipped_rows_are_listed():
    folder_of_images(12)
    truncated("images/2.png")
    append("1.png,2")
    done = call("train", "--images", "images", "--candidates", "labels.csv", "--skip-bad", *TINY, "--out", "run")
    assert done.code == 0
    lines = done.err.splitlines()
    assert len(lines) == 2 and all(line.startswith("urrl: skipped: ") for line in lines)
    assert "line 14" in lines[0] and "2.png" in lines[1]


@pytest.mark.parametrize("rows, options, words", [
    ([("0.png", "cat"), ("1.png", "cat")], [], ["only one class", "'cat'"]),
    ([("0.png", "cat|dog"), ("1.png", "dog|cat"), ("2.png", "")], [], ["every item names every class"]),
    ([("0.png", "cat"), ("1.png", "dgo")], ["--classes", "cat,dog"], ["labels.csv, line 3", "'dgo'", "unknown"]),
    ([("0.png", ""), ("1.png", "")], [], ["no row has a candidate class"]),
])  # fmt: skip
def test_sets_from_which_nothing_can_be_learned(rows, options, words):
    folder_of_images(3)
    write_labels(rows)
    assert_refused(call("train", "--images", "images", "--candidates", "labels.csv", *options, *TINY), *words)


@pytest.mark.parametrize("text, words", [
    (b"", ["labels.csv", "name the columns"]),
    (b"item,item\na,b\n", ["labels.csv", "name the columns"]),
    (b"item,label\na.png,b\n", ["labels.csv", "no column 'candidates'"]),
    (b"item,candidates\na.png,\xff\xfe\n", ["labels.csv", "UTF-8"]),
    (None, ["labels.csv: no such file"]),
])  # fmt: skip
def test_tables_that_are_none(text, words):
    folder_of_images(2)
    Path("labels.csv").unlink() if text is None else Path("labels.csv").write_bytes(text)
    assert_refused(call("train", "--images", "images", "--candidates", "labels.csv", *TINY), *words)


def test_nan_features():
    frame = table().astype({"x1": object})
    frame.loc[4, "x1"] = np.nan
    frame.loc[7, "x1"] = "seven"
    frame.to_csv("t.csv", index=False)
    source = {"table": "t.csv", "features": "x*", "candidates": "labels"}
    command = ["train", "--table", "t.csv", "--features", "x*", "--candidates", "labels", *TINY]
    assert_refused(call(*command), "t.csv, line 6", "'x1'", "no finite number")
    loaded = load_source(source | {"skip_bad": True})
    assert [line.split(":")[0] for line in loaded.skipped] == ["t.csv, line 6", "t.csv, line 9"]
    assert len(loaded.dataset.x) == 28 and "r4" not in loaded.items
    np.savez("o.npz", x=np.array([[0, 1], [np.inf, 2], [1, 1]]), candidates=["a", "b", "a"])
    assert_refused(call("train", "--npz", "o.npz", *TINY), "o.npz, row 1", "feature 0")


def test_damaged_files():
    for name, way in (("t.parquet", "--table"), ("t.json", "--table"), ("t.npz", "--npz"), ("t.xls", "--table")):
        Path(name).write_bytes(b"nothing of the kind")
        candidates = ["--candidates", "labels"] if way == "--table" else []
        assert_refused(call("train", way, name, *candidates, *TINY), name)
    np.savez("t.npz", x=np.eye(3))
    assert_refused(call("train", "--npz", "t.npz", *TINY), "no array 'candidates'")
    np.savez("t.npz", x=np.eye(3), candidates=["a", "b"])
    assert_refused(call("train", "--npz", "t.npz", *TINY), "3 rows of x, but 2 of candidates")
    np.savez("t.npz", x=np.eye(2), candidates=np.array([{1}, {2}]))  # pickles
    assert_refused(call("train", "--npz", "t.npz", *TINY), "t.npz")


@pytest.mark.parametrize("options, words", [
    ([], "--dataset, --images, --table and --npz"),
    (["--dataset", "digits", "--npz", "o.npz"], "--dataset, --images, --table and --npz"),
    (["--images", "images"], "--candidates"),
    (["--npz", "o.npz", "--eta", "0.3"], "--eta does not go with --npz"),
    (["--npz", "o.npz", "--subset", "3"], "--subset"),
    (["--dataset", "digits", "--features", "x"], "--features does not go with --dataset"),
    (["--dataset", "digits", "--skip-bad"], "--skip-bad does not go with --dataset"),
    (["--npz", "o.npz", "--recipe", "paper"], "--recipe paper"),
    (["--images", "none", "--candidates", "labels.csv"], "none: no such folder"),
])  # fmt: skip
def test_options_that_do_not_go_together(options, words):
    assert_refused(call("train", *options), words)


def test_a_million_rows():
    rng = np.random.default_rng(0)
    sets = np.array(["cat", "cat|lynx", "dog", "", "wolf|dog|lynx"])[rng.integers(5, size=1_000_000)]
    lines = "\n".join(f"r{i},{s},{i % 7}.25" for i, s in enumerate(sets))
    Path("big.csv").write_text(f"item,candidates,x\n{lines}\n")
    began = time.process_time()
    loaded = load_source({"table": "big.csv", "features": "x", "candidates": "candidates"})
    assert time.process_time() - began < 20
    assert loaded.dataset.x.shape == (1_000_000, 1) and loaded.dataset.classes == ("cat", "dog", "lynx", "wolf")
    assert float(loaded.dataset.x.sum()) == pytest.approx(sum(i % 7 + 0.25 for i in range(1_000_000)))
    assert loaded.items[-1] == "r999999"


# ---- from files to predictions ---------------------------------------------------------------------------


def test_few_images_to_the_end():
    """Fewer items than neighbours, twelve in all; predictions for a folder, a bad file among them."""
    folder_of_images(12)
    done = call("train", "--images", "images", "--candidates", "labels.csv", *TINY, "--out", "run")
    assert (done.code, done.err) == (0, "") and "test accuracy     unknown" in done.out
    config = json.loads(Path("run/config.json").read_text())
    assert config["source"]["images"] == str(Path("images").resolve())
    again = call("train", "--images", "images", "--candidates", "labels.csv", *TINY, "--out", "run", "--resume")
    assert again.out == done.out

    picture("images/new/größe.jpg", size=(40, 30), mode="RGB")
    Path("images/notes.txt").write_text("no image, not asked for")
    assert call("predict", "run", "images", "--out", "p.csv", "--threads", 1).out == "13 predictions in p.csv\n"
    predicted = read_table(Path("p.csv"))
    assert predicted["item"].tolist()[-1] == "new/größe.jpg" and set(predicted["label"]) <= {"0", "1", "2"}
    truncated("images/3.png")
    assert_refused(call("predict", "run", "images", "--out", "q.csv"), "3.png", "not an image")
    assert not Path("q.csv").exists()
    done = call("predict", "run", "images", "--out", "q.csv", "--skip-bad", "--threads", 1)
    assert done.code == 0 and done.out.startswith("12 predictions") and "3.png" in done.err
    assert read_table(Path("q.csv"))["item"].tolist() == [i for i in predicted["item"] if i != "3.png"]


def test_a_table_to_the_end():
    table(60).to_parquet("t.parquet")
    command = ["train", "--table", "t.parquet", "--features", "x*", "--candidates", "labels", *TINY, "--out", "run"]
    for setting in ("flip_test=true", "move_test=1", "pad=2"):
        assert_refused(call(*command, "--set", setting), setting, "takes images")
    done = call(*command)
    assert (done.code, done.err) == (0, "")
    table(60)[["x2", "x0", "x1", "item"]].to_csv("new.csv", index=False)  # another order
    assert call("predict", "run", "new.csv", "--out", "p.csv", "--threads", 1).code == 0
    np.save("new.npy", table(60)[["x0", "x1", "x2"]].to_numpy())
    assert call("predict", "run", "new.npy", "--out", "q.csv", "--threads", 1).code == 0
    p, q = read_table(Path("p.csv")), read_table(Path("q.csv"))
    assert p["label"].tolist() == q["label"].tolist() and p["item"].tolist()[:2] == ["r0", "r1"]
    table(60)[["x0", "x1"]].to_csv("short.csv", index=False)
    assert_refused(call("predict", "run", "short.csv", "--out", "r.csv"), "short.csv", "'x2'")
    folder_of_images(2)
    assert_refused(call("predict", "run", "images", "--out", "r.csv"), "features, not images")


def test_nothing_to_predict(runs):
    Path("empty").mkdir()
    table(3).to_csv("t.csv", index=False)
    for what, words in (("empty", "no image"), ("t.csv", "not trained on a table"), ("none.npy", "no such file")):
        assert_refused(call("predict", runs[0] / "images", what, "--out", "p.csv"), what, words)
    assert not Path("p.csv").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs on own data: grey images, and features."""
    place = tmp_path_factory.mktemp("runs")
    digits = load("digits")
    S = generate(digits.truth[:60], 10, 0.2, 0.2).mask.numpy()
    arrays = {"images": digits.x[:60, 0].numpy(), "features": digits.x[:60].flatten(1).double().numpy()}
    several = ["--set", "flip_test=true", "--set", "move_test=1", "--set", "members=2"]
    looks = {"images": several, "features": []}
    for name, x in arrays.items():
        np.savez(place / f"{name}.npz", x=x, candidates=S, classes=[f"digit {c}" for c in range(10)])
        assert call("train", "--npz", place / f"{name}.npz", *TINY, *looks[name], "--out", place / name).code == 0
    return place, arrays


@pytest.mark.parametrize("kind", ["images", "features"])
def test_export(runs, kind):
    place, arrays = runs
    x = as_items(arrays[kind])
    x = x if kind == "images" else x.float()
    call("predict", place / kind, place / f"{kind}.npz", "--out", "p.csv", "--threads", 1)
    wanted = read_table(Path("p.csv"), lambda names: ["confidence"])

    def check(probabilities, classes):
        best = probabilities.argmax(1)
        assert [classes[c] for c in best] == wanted["label"].tolist()
        assert np.abs(probabilities.max(1) - wanted["confidence"]).max() < 1e-3

    assert call("export", place / kind, "--torch", "m.pt2").out == "m.pt2\n"
    extra = {"classes.json": ""}
    program = torch.export.load("m.pt2", extra_files=extra)
    check(program.module()(x).detach().numpy(), json.loads(extra["classes.json"]))

    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    done = call("export", place / kind, "--onnx", "m.onnx")
    assert (done.code, done.out) == (0, "m.onnx\n")
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    check(session.run(["probabilities"], {"x": x.numpy()})[0], classes)
    assert_refused(call("export", place / kind, "--onnx", "m.onnx"), "m.onnx: exists")


def test_export_refuses_features_that_it_could_not_tell_apart():
    x = 1.7e12 + 1000 * np.random.default_rng(0).normal(size=(40, 2))
    np.savez("far.npz", x=x, candidates=np.arange(40) % 2)
    assert call("train", "--npz", "far.npz", *TINY, "--out", "far").code == 0
    assert_refused(call("export", "far", "--torch", "m.pt2"), "feature 0", "single precision")
    assert not Path("m.pt2").exists()


def test_narrow_images_train():
    x = np.random.default_rng(0).integers(0, 256, (24, 20, 1), np.uint8)
    np.savez("narrow.npz", x=x, candidates=np.arange(24) % 3)
    assert call("train", "--npz", "narrow.npz", *TINY, "--out", "narrow").code == 0


def test_outputs_that_overflow_are_told():
    np.savez("f.npz", x=np.random.default_rng(0).normal(size=(60, 4)), candidates=np.arange(60) % 3)
    one = ["--epochs", 1, "--set", "batch_size=64", "--set", "lr=1e25", "--threads", 1, "--quiet"]
    done = call("train", "--npz", "f.npz", *one, "--out", "f")
    assert done.code != 0 and "nan in epoch 1" in done.err and "Traceback" not in done.err


def test_export_refuses(runs):
    assert_refused(call("export", runs[0] / "images"), "--onnx and --torch")
    assert_refused(call("export", "none", "--torch", "m.pt2"), "no finished run")
