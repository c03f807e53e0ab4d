"""The command line as others' scripts use it: what it writes, what it prints, and how it refuses."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import urrl
import urrl.demo
from tests.runs import TINY, assert_same, call, outcome, tree
from urrl.candidates import CandidateSets
from urrl.config import RECIPES, Training, describe, parse_settings
from urrl.data import DATASETS, load, split
from urrl.errors import UserError
from urrl.methods import METHODS
from urrl.run import make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run. Nothing may change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert call(*TINY, "--out", folder).code == 0
    before = tree(folder)
    yield folder
    assert tree(folder) == before


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_refused(done, *words: str) -> None:
    """One clear line and exit code 2."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("urrl: ") and done.err.endswith("\n") and done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


def process(*command: object, **environ: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["train"]])
def test_help_is_there_at_once(command):
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = process("-m", "urrl", *command, "--help")
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0 and "usage: urrl" in done.stdout
    assert min(seconds) < 0.5


def test_help_imports_nothing_heavy():
    code = "import sys, urrl.cli; urrl.cli.parser().format_help(); print(*sys.modules)"
    modules = set(process("-c", code).stdout.split())
    assert "urrl.cli" in modules
    assert not modules & {"torch", "numpy", "sklearn", "matplotlib", "rich"}


def test_help_names_every_option_of_the_contract():
    text = call("train", "--help").out
    options = "dataset method eta mu recipe epochs seed out data-dir set resume subset candidates device threads"
    for option in options.split():
        assert f"--{option} " in text or f"--{option}\n" in text, option


def test_no_command_prints_help():
    assert call() == call("--help")
    assert call("--version").out == f"urrl {urrl.__version__}\n"


# ---- train -----------------------------------------------------------------------------------------------


def rate(value) -> bool:
    return type(value) is float and 0 <= value <= 1


RESULT = {
    "method": lambda v: v == "urrl",
    "dataset": lambda v: v == "digits",
    "eta": lambda v: v == 0.3,
    "mu": lambda v: v == 0.3,
    "convention": lambda v: v == "paper",
    "seed": lambda v: v == 0,
    "recipe": lambda v: v == "fast",
    "test_accuracy": rate,
    "val_accuracy": rate,
    "best_epoch": lambda v: type(v) is int and 0 <= v < 3,
    "epochs": lambda v: v == 3,
    "seconds": lambda v: type(v) is float and 0 < v < 60,
    "train_flops": lambda v: type(v) is int and v > 1e6,
    "samples_per_second": lambda v: type(v) is float and v > 1,
    "corrected": lambda v: type(v) is int and v > 0,
    "corrected_precision": rate,
    "true_in_set_before": rate,
    "true_in_set_after": rate,
    "label_accuracy": rate,
    "sets_sha256": lambda v: re.fullmatch("[0-9a-f]{64}", v),
    "version": lambda v: v == urrl.__version__,
}


def test_what_a_run_leaves(finished):
    files = "candidates.npz config.json curves.png last.ckpt metrics.jsonl model.ckpt previous.ckpt result.json"
    assert sorted(path.name for path in finished.iterdir()) == files.split()
    result = json.loads((finished / "result.json").read_text())
    for key, sane in RESULT.items():
        assert sane(result[key]), (key, result[key])
    assert result["true_in_set_after"] >= result["true_in_set_before"]
    assert (result["test_accuracy"] * result["n_test"]) % 1 == pytest.approx(0, abs=1e-9)

    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert max(record["val_accuracy"] for record in records) == result["val_accuracy"]
    assert records[result["best_epoch"]]["val_accuracy"] == result["val_accuracy"]
    assert sum(record["corrected_now"] for record in records) == result["corrected"] > 0
    for record in records:  # the losses by term
        weighted = record["sup"] + 5 * record["m"] + record["cr"]
        assert record["loss"] == pytest.approx(weighted, rel=1e-4)

    config = json.loads((finished / "config.json").read_text())
    assert config["training"]["width"] == 2 and config["options"]["phi"] == 0.2
    assert config["version"] == urrl.__version__
    assert CandidateSets.load(finished / "candidates.npz").sha256 == result["sets_sha256"]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_bounds_and_the_default_folder():
    for method, bound in (("average", "lower"), ("supervised", "upper")):
        done = call(*BASE, "--set", "width=2", "--method", method)
        assert done.code == 0
        (folder,) = Path("runs").glob(f"digits-{method}-*")
        result = json.loads((folder / "result.json").read_text())
        assert (result["bound"], result["corrected"], result["corrected_precision"]) == (bound, 0, None)
        assert str(folder) in done.out and f"the {bound} bound" in done.out


BASE = shlex.split("train --dataset digits --subset 120 --epochs 3 --threads 1 --quiet")
BAD = {
    "unknown option": ("--nonsense 3", "--nonsense"),
    "shortened option": ("--epoch 3", "--epoch"),
    "option without a value": ("--eta", "--eta"),
    "unknown --set key": ("--set nonsense=3", "nonsense"),
    "--set key of another method": ("--method average --set phi=0.5", "phi"),
    "--set without =": ("--set lr", "KEY=VALUE"),
    "--set without a key": ("--set =3", "KEY=VALUE"),
    "--set twice": ("--set lr=1 --set lr=2", "lr is given twice"),
    "epochs twice": ("--set epochs=4", "epochs is given twice"),
    "a word for a number": ("--set phi=abc", "phi takes a number"),
    "a list for a number": ("--set lr=[1]", "lr takes a number"),
    "a fraction for a whole number": ("--set embed_dim=1.5", "embed_dim takes a whole number"),
    "a number for a switch": ("--set use_cr=1", "use_cr takes true or false"),
    "a number for a word": ("--set net=3", "net takes a word"),
    "epochs are whole": ("--epochs 1.5", "--epochs"),
    "seeds are whole": ("--seed x", "--seed"),
    "rates are numbers": ("--eta x", "--eta"),
    "no epochs": ("--epochs 0", "epochs must be between"),
    "moved out of the image": ("--set pad=8", "pad=8 takes images of more than 8 pixels"),
    "members that share no embedding": ("--method pico --set members=2", "members above 1 does not go with pico"),
    "no members": ("--set members=0", "members must be between"),
    "infinite lr": ("--set lr=Infinity", "lr takes a finite number"),
    "lr that is no number": ("--set lr=NaN", "lr takes a finite number"),
    "phi out of range": ("--set phi=2", "phi must be between"),
    "alpha out of range": ("--set alpha=-1", "alpha must be at least"),
    "warmup out of range": ("--set warmup=2", "warmup must be between"),
    "unknown schedule": ("--set schedule=sine", "sine"),
    "unknown net": ("--set net=vgg", "vgg"),
    "net for other data": ("--set net=mlp", "mlp"),
    "nesterov without momentum": ("--set momentum=0", "nesterov"),
    "eta out of range": ("--eta 1.5", "eta"),
    "eta that is no number": ("--eta nan", "eta"),
    "mu out of range": ("--mu -0.1", "mu"),
    "mu for clean sets": ("--convention clean", "mu must be 0"),
    "unknown dataset": ("--dataset mnist2", "mnist2"),
    "unknown method": ("--method nonsense", "nonsense"),
    "unknown recipe": ("--recipe slow", "slow"),
    "unknown convention": ("--convention nonsense", "nonsense"),
    "unknown split": ("--split nonsense", "nonsense"),
    "no official split": ("--split official", "official"),
    "no items": ("--subset 0", "subset"),
    "one item": ("--subset 1", "2 items"),
    "too many items": ("--subset 5000", "subset"),
    "no threads": ("--threads 0", "--threads"),
    "too many threads": ("--threads 1000000", "--threads"),
    "unknown device": ("--device nonsense", "nonsense"),
    "no such data folder": ("--data-dir nowhere", "nowhere"),
    "no such candidates": ("--candidates nowhere.npz", "nowhere.npz"),
    "candidates that are none": ("--candidates file", "file"),
    "below a file": ("--out file/sub", "file/sub"),
    "a file": ("--out file", "file"),
    "a folder of others": ("--out foreign", "foreign"),
    "another program's folder": ("--out strange", "strange"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "word"), BAD.values(), ids=BAD)
def test_bad_input(tmp_path, arguments, word):
    Path("file").write_text("keep me")
    for name, file in (("foreign", "movie.part"), ("strange", "config.json")):
        Path(name).mkdir()
        Path(name, file).write_text("[1, 2]")
    before = tree(tmp_path)
    assert_refused(call(*BASE, "--out", "run", *arguments.split()), word)
    assert tree(tmp_path) == before


def test_a_number_may_begin_with_its_point():
    assert parse_settings(["phi=.5", "lr=-.25", "net=.lean"]) == {"phi": 0.5, "lr": -0.25, "net": ".lean"}


@pytest.mark.parametrize("arguments", [["nonsense"], ["train"], ["generate", "--dataset", "digits"], ["predict"]])
def test_bad_command(tmp_path, arguments):
    assert_refused(call(*arguments), "--help")
    assert tree(tmp_path) == {}


def test_a_folder_that_holds_another_run(finished):
    assert_refused(call(*TINY, "--out", finished, "--seed", "1", "--resume"), str(finished), "seed")
    assert_refused(call(*TINY, "--out", finished, "--set", "lr=0.5"), "training")
    assert_refused(call(*TINY, "--out", finished, "--method", "nonsense"), "nonsense")


def test_a_folder_that_holds_this_run(finished):
    assert_refused(call(*TINY, "--out", finished), str(finished), "--resume")


def test_missing_data_is_told_at_once(tmp_path):
    """No files anywhere and no network (a proxy that is not there): one line says what to put where."""
    nothing = str(tmp_path / "nothing")
    empty = {name: nothing for name in ("HOME", "XDG_CACHE_HOME", "URRL_DATA")}
    proxies = {name: "http://127.0.0.1:1" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    began = time.perf_counter()
    done = process("-m", "urrl", *shlex.split("train --dataset cifar10 --out run"), **empty, **proxies, no_proxy="")
    assert time.perf_counter() - began < 30
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("urrl: ") and done.stderr.count("\n") == 1
    for word in ("test_batch.bin", "--data-dir", "URRL_DATA", str(Path(nothing, "urrl"))):
        assert word in done.stderr
    assert not Path("run").exists()


# ---- generate --------------------------------------------------------------------------------------------

CELL = shlex.split("--dataset digits --subset 120 --eta 0.5 --mu 0.2")


def sha(done) -> str:
    assert (done.code, done.err) == (0, "")
    return re.search("sha256 ([0-9a-f]{64})", done.out)[1]  # type: ignore[index]


def test_generate():
    first = sha(call("generate", *CELL, "--out", "new/a.npz"))
    assert first == sha(call("generate", *CELL, "--out", "b.npz")) == CandidateSets.load(Path("b.npz")).sha256
    assert first != sha(call("generate", *CELL, "--seed", "1", "--out", "c.npz"))
    before = tree(Path())
    assert_refused(call("generate", *CELL, "--seed", "2", "--out", "b.npz"), "b.npz")
    assert_refused(call("generate", *CELL, "--out", "b.npz/c.npz"), "b.npz")
    assert_refused(call("generate", *CELL, "--eta", "2", "--out", "d.npz"), "eta")
    assert tree(Path()) == before


def test_train_on_saved_sets(finished):
    saved = sha(call("generate", *CELL, "--out", "sets.npz"))
    assert call(*TINY, "--candidates", "sets.npz", "--out", "run").code == 0
    result = json.loads(Path("run/result.json").read_text())
    assert saved == result["sets_sha256"] == CandidateSets.load(Path("run/candidates.npz")).sha256
    assert saved != json.loads((finished / "result.json").read_text())["sets_sha256"]
    assert (result["eta"], result["mu"]) == (0.5, 0.2)  # the sets' own, not the defaults of the options

    # Sets drawn as the run itself would draw them make the same run.
    call("generate", "--dataset", "digits", "--subset", "120", "--out", "same.npz")
    assert call(*TINY, "--candidates", "same.npz", "--out", "same").code == 0
    assert_same(outcome(Path("same"))["model"], outcome(finished)["model"])


def test_saved_sets_that_do_not_fit(tmp_path):
    call("generate", *CELL, "--out", "sets.npz")
    call("generate", *CELL, "--subset", "100", "--out", "fewer.npz")
    whole = Path("sets.npz").read_bytes()
    Path("half.npz").write_bytes(whole[: len(whole) // 2])
    CandidateSets(torch.ones(120, 9, dtype=torch.bool)).save(Path("nine.npz"))
    before = tree(tmp_path)
    assert_refused(call(*TINY, "--candidates", "fewer.npz", "--out", "run"), "fewer.npz: 100 sets", "120 items")
    assert_refused(call(*TINY, "--candidates", "nine.npz", "--out", "run"), "9 classes")
    assert_refused(call(*TINY, "--candidates", "half.npz", "--out", "run"), "half.npz")
    # With another seed the split is another: the sets would be those of other items.
    assert_refused(call(*TINY, "--candidates", "sets.npz", "--seed", "1", "--out", "run"), "seed")
    call("generate", *CELL, "--split", "fold:1", "--out", "fold.npz")
    before = tree(tmp_path)
    assert_refused(call(*TINY, "--candidates", "fold.npz", "--out", "run"), "split fold:1", "split paper")
    assert_refused(call(*TINY, "--candidates", "sets.npz", "--mu", "0.1", "--out", "run"), "--mu")
    assert tree(tmp_path) == before


def test_damaged_sets_are_refused(tmp_path):
    """Any one damaged byte: refused, or harmless (in a field of the zip that nobody reads)."""
    call("generate", *CELL, "--out", "sets.npz")
    path, whole = Path("sets.npz"), Path("sets.npz").read_bytes()
    good = CandidateSets.load(path).sha256
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            assert CandidateSets.load(path).sha256 == good
        except UserError as error:
            assert str(error).startswith("sets.npz: ") and "\n" not in str(error)
            refused += 1
    assert refused > len(whole) / 2


# ---- predict ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def test_part():
    return split(load("digits"), "paper", 0, 120).test


def test_predict(finished, test_part):
    images = test_part.x.squeeze(1).numpy()  # (n, H, W)
    np.save("grey.npy", images)
    np.save("channels.npy", np.asfortranarray(images[..., None]))
    done = call("predict", finished, "grey.npy", "--out", "new/labels.csv", "--threads", "1")
    assert done.code == 0 and "new/labels.csv" in done.out
    with open("new/labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows] == [str(i) for i in range(len(images))]
    assert all(0.1 <= float(row["confidence"]) <= 1 for row in rows)  # of ten classes, the likeliest
    right = np.mean([int(row["label"]) == y for row, y in zip(rows, test_part.truth.tolist())])
    assert right == json.loads((finished / "result.json").read_text())["test_accuracy"]

    assert call("predict", finished, "channels.npy", "--out", "b.csv", "--threads", "1").code == 0
    assert Path("b.csv").read_bytes() == Path("new/labels.csv").read_bytes()
    np.save("none.npy", images[:0])
    assert call("predict", finished, "none.npy", "--out", "none.csv").code == 0
    assert Path("none.csv").read_text() == "item,label,confidence\n"


def test_predict_refuses(tmp_path, finished):
    np.save("good.npy", np.zeros((3, 8, 8), np.uint8))
    np.save("floats.npy", np.zeros((3, 8, 8)))
    np.save("large.npy", np.zeros((3, 28, 28), np.uint8))
    np.save("flat.npy", np.zeros(64, np.uint8))
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    Path("text.npy").write_text("no array")
    Path("zip.npy").write_bytes(b"PK\x03\x04 no zip")
    Path("cut.npy").write_bytes(Path("good.npy").read_bytes()[:-1])
    Path("empty.npy").touch()
    shutil.copytree(finished, "unfinished")
    Path("unfinished/result.json").unlink()
    shutil.copytree(finished, "damaged")
    Path("damaged/model.ckpt").write_bytes(Path("damaged/model.ckpt").read_bytes()[:-1])
    np.savez("several.npz", a=np.zeros((3, 8, 8), np.uint8))
    before = tree(tmp_path)
    for name in ("floats", "large", "flat", "objects", "text", "zip", "cut", "empty", "missing"):
        assert_refused(call("predict", finished, f"{name}.npy", "--out", "out.csv"), f"{name}.npy")
    assert_refused(call("predict", finished, "several.npz", "--out", "out.csv"), "several.npz")
    for run in ("unfinished", "damaged", "nowhere"):
        assert_refused(call("predict", run, "good.npy", "--out", "out.csv"), run)
    assert_refused(call("predict", finished, "good.npy", "--out", "flat.npy"), "flat.npy", "exists")
    assert_refused(call("predict", finished, "good.npy", "--out", "flat.npy/out.csv"), "flat.npy")
    assert_refused(call("predict", finished, "good.npy", "--out", "out.csv", "--device", "nonsense"), "nonsense")
    assert tree(tmp_path) == before


# ---- the rest --------------------------------------------------------------------------------------------


def names(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.strip()}


def test_lists():
    methods = call("methods").out
    assert names(methods) == METHODS.keys()
    assert all(len(line.split()) > 3 for line in methods.splitlines())  # each with what it is
    urrl_options = {name for name, *_ in describe(METHODS["urrl"].Config)}
    assert names(call("methods", "urrl").out) == urrl_options >= {"w_m", "w_cr", "tau", "k", "phi", "alpha"}
    assert_refused(call("methods", "nonsense"), "nonsense", "urrl")
    assert names(call("datasets").out) == DATASETS.keys()
    recipes = call("recipes").out
    assert names(recipes) >= {*RECIPES, *DATASETS, *(name for name, *_ in describe(Training))}


def test_show_augment():
    done = call("show-augment", "--dataset", "digits", "--out", "new/views.png")
    assert (done.code, done.err) == (0, "")
    picture = Path("new/views.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert call("show-augment", "--dataset", "digits", "--out", "same.png").code == 0
    assert Path("same.png").read_bytes() == picture
    assert call("show-augment", "--dataset", "digits", "--seed", "1", "--out", "other.png").code == 0
    assert Path("other.png").read_bytes() != picture
    assert_refused(call("show-augment", "--dataset", "digits", "--out", "views.txt"), "views.txt")


def test_demo(monkeypatch):
    def tiny(dataset, method, recipe, settings, **cell):
        return make_run(dataset, method, recipe, {"epochs": 2, "width": 2}, subset=100, **cell)

    monkeypatch.setattr(urrl.demo, "make_run", tiny)
    done = call("demo", "--out", "d", "--threads", "1", "--quiet")
    assert (done.code, done.err) == (0, "")
    results = {m: json.loads(Path("d", m, "result.json").read_text()) for m in ("urrl", "average", "supervised")}
    for line, method in (("average over the set", "average"), ("with URRL", "urrl"), ("clean labels", "supervised")):
        (row,) = [row for row in done.out.splitlines() if line in row]
        assert row.split()[-1] == f"{results[method]['test_accuracy']:.2%}"
    assert f"URRL corrected {results['urrl']['corrected']} " in done.out
    assert "d/urrl/curves.png" in done.out and Path("d/urrl/curves.png").exists()
    before = tree(Path("d"))
    assert call("demo", "--out", "d", "--threads", "1", "--quiet") == done  # again: the same, at once
    assert tree(Path("d")) == before
