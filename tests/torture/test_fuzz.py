"""Random and damaged input to everything that reads: the right result or one line that says what is wrong, and never
anything else."""

import contextlib
import datetime
import decimal
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError

import hypothesis.extra.numpy as hnp
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from PIL import Image

import urrl.demo
from tests.runs import assert_same, call
from tests.torture.conftest import LONG
from urrl import checkpoint
from urrl.bench import KEYS, read_grid
from urrl.candidates import CandidateSets, generate
from urrl.cli import main
from urrl.config import RECIPES, Run, Training, parse_settings, resolve
from urrl.data.files import load_source
from urrl.errors import UserError
from urrl.estimator import PartialLabelClassifier, URRLClassifier
from urrl.files import read_json, read_npz, sealed, unseal
from urrl.methods import METHODS
from urrl.parse import from_annotations, parse_candidates
from urrl.run import make_run
from urrl.tables import read_table, write_table

QUIET = pytest.mark.filterwarnings("ignore")  # numpy and pandas warn about odd values: they may


def fuzz(short, long):
    """So many inputs: the same at every short run, new ones at a long one."""
    return settings(max_examples=long if LONG else short, derandomize=not LONG, database=None, deadline=None,
                    suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.explain})  # fmt: skip


@pytest.fixture(scope="module")
def attempt(count):
    """attempt(what, function, errors): its result, or None where it raised one of the errors in one line."""

    def run(what, function, errors=(UserError,)):
        figures = dict.fromkeys(("results", "clean_errors", "tracebacks"), 0)
        try:
            result = function()
            figures["results"] = 1
            return result
        except errors as error:
            figures["clean_errors"] = 1
            assert str(error)
            if isinstance(error, UserError):
                assert len(str(error).splitlines()) == 1 and str(error).isprintable(), error
            return None
        except BaseException:
            figures["tracebacks"] = 1
            raise
        finally:
            count(f"fuzzed inputs: {what}", **figures)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# ---- values ----------------------------------------------------------------------------------------------

ODD = ["", " ", "|", "a|b", " a | b ", "||", "a|", "\0", "\ud800", "\n", "a\nb", "\ufeff", "\u2028", "'", "'=1", "=1+1",
       "-1", "\t", "\r", '"', '"a', "a,b", "nan", "None", "猫|山猫", "e\u0301", "1e400", "x" * 300]  # fmt: skip
SURROGATE = re.compile("[\ud800-\udfff]")
WORDS = st.sampled_from(ODD) | st.text(st.characters(exclude_categories=()), max_size=6)
TEXT = WORDS.filter(lambda word: not SURROGATE.search(word))
NUMBERS = st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, -0.0])
SCALARS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | WORDS
    | st.binary(max_size=3)
    | st.sampled_from([pd.NA, pd.NaT, np.str_("a"), np.float32("nan"), np.int8(1), np.bool_(True), np.array(1), 1j,
                       decimal.Decimal("NaN"), datetime.date(2020, 1, 1), object, ..., np.datetime64("NaT")])
)  # fmt: skip
HASHABLE = st.none() | st.booleans() | NUMBERS | WORDS | st.tuples(NUMBERS, WORDS)
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(WORDS, inner, max_size=3)
        | st.frozensets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.one_of(
    hnp.arrays(hnp.scalar_dtypes(), SHAPES),
    hnp.arrays(bool, SHAPES),
    hnp.arrays(np.int8, SHAPES, elements=st.integers(0, 1)),
    hnp.arrays(object, SHAPES, elements=SCALARS),
)
CLASSES = st.sampled_from(["cat", "dog", "lynx", "猫", "a|b", " x", 0, 1, 2, 7])
USUAL = st.lists(st.lists(CLASSES, max_size=3) | CLASSES | st.just("cat|dog"), max_size=5)


def in_words(row, names):
    """The classes that a row means; None where it takes more than this to know."""
    if isinstance(row, str) and row not in names:
        return {part.strip() for part in row.split("|")} - {""}
    if isinstance(row, (list, tuple, frozenset)):
        return {name.item() if isinstance(name, np.ndarray) else name for name in row}
    return {row} if isinstance(row, (str, int)) else None


@QUIET
@fuzz(120, 3000)
@given(
    st.one_of(USUAL, st.lists(NESTED, max_size=5), NESTED, ARRAYS, ARRAYS.filter(np.ndim).map(list)),
    st.none() | st.lists(CLASSES, max_size=4) | NESTED,
)
@example([[np.array(1)]], None)
@example(["a"], np.array(1))
def test_candidates(attempt, candidates, classes):
    read = attempt("candidate sets in Python", lambda: parse_candidates(candidates, classes))
    if read is None:
        return
    sets, names = read
    assert sets.mask.shape == (len(candidates), len(names)) and sets.mask.any(1).all()
    assert len(set(names)) == len(names)
    for row, mask in zip(candidates if isinstance(candidates, (list, tuple)) else [], sets.mask.tolist()):
        if meant := in_words(row, classes or []):
            assert {name for name, inside in zip(names, mask) if inside} == meant


@QUIET
@fuzz(80, 1500)
@given(st.data())
def test_annotations(attempt, data):
    n = data.draw(st.integers(0, 5))
    column = st.lists(CLASSES, min_size=n, max_size=n) | st.lists(SCALARS, min_size=n, max_size=n) | NESTED | ARRAYS
    how = st.sampled_from(["union", 1, 2, 0.5]) | SCALARS | ARRAYS
    item, annotator, label, rule = (data.draw(drawn) for drawn in (column, column, column, how))
    read = attempt("annotators' votes", lambda: from_annotations(item, annotator, label, rule))
    if read is not None:
        items, sets = read
        assert len(items) == len(sets) <= len(item) and len(set(items)) == len(items)


# ---- tables ----------------------------------------------------------------------------------------------

CELLS = st.none() | st.booleans() | NUMBERS | WORDS | st.lists(WORDS | NUMBERS, max_size=3)
NAMES = st.sampled_from(["item", "candidates", "annotator", "label", "x1", "x2"]) | WORDS


def good_rows():
    return [{"item": f"i{i}", "x1": i / 2, "x2": -i, "candidates": "a|b" if i % 2 else "b"} for i in range(4)]


@st.composite
def spoiled(draw):
    """A table to learn from, as records; some of its cells and names have become something else."""
    rows = good_rows()
    for i, name, cell in draw(st.lists(st.tuples(st.integers(0, 3), NAMES, CELLS), max_size=3)):
        rows[i][name] = cell
    if draw(st.booleans()):
        old, new = draw(st.tuples(NAMES, NAMES))
        rows = [{new if name == old else name: cell for name, cell in row.items()} for row in rows]
    return rows


def as_csv(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(map(",".join, lines)).encode(errors="surrogatepass")


LINES = st.lists(st.lists(WORDS | NUMBERS.map(repr), max_size=4).map(",".join), max_size=6).map("\n".join)
HEADS = st.sampled_from(
    ["item,candidates", "x1,x2,candidates", "candidates", "\ufeffx1,candidates", "item,annotator,label"]
)
CSV = st.one_of(
    st.binary(max_size=60),
    spoiled().map(as_csv),
    st.tuples(HEADS | st.just(""), LINES).map(lambda parts: "\n".join(parts).encode(errors="surrogatepass")),
)
RECORDS = st.lists(st.dictionaries(NAMES, CELLS, max_size=4), max_size=5)
COLUMNS = st.dictionaries(NAMES, st.lists(CELLS, max_size=4), max_size=4)
VALUES = spoiled() | RECORDS | COLUMNS | CELLS
JSON = st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode())


def learned_from(path, **options):
    """What training would take from a table, in each of the ways that it can."""
    return load_source({"table": str(path), "features": None, "candidates": "candidates", **options})


@QUIET
@fuzz(120, 2500)
@given(CSV, st.booleans())
def test_csv(attempt, folder, content, skip_bad):
    _read(attempt, folder / "t.csv", content, skip_bad)


@QUIET
@fuzz(120, 2500)
@given(JSON, st.booleans())
def test_json(attempt, folder, content, skip_bad):
    _read(attempt, folder / "t.json", content, skip_bad)


def _read(attempt, path, content, skip_bad):
    path.write_bytes(content)
    frame = attempt(f"a {path.suffix} table", lambda: read_table(path, skipped=[] if skip_bad else None))
    assert frame is None or all(isinstance(name, str) for name in frame)
    loaded = attempt(f"training on a {path.suffix} table", lambda: learned_from(path, skip_bad=skip_bad))
    if loaded is not None:
        assert len(loaded.items) == len(loaded.dataset.x) == len(loaded.dataset.S)
        assert torch.isfinite(loaded.dataset.x).all() and loaded.dataset.S.any(1).all()
    source = {"images": str(path.parent), "candidates": str(path), "skip_bad": skip_bad}
    attempt(f"labels of images in a {path.suffix} table", lambda: load_source(source))


FRAME = pd.DataFrame({"x1": [1.0, 2.0, 3.0, 4.0], "x2": [4.0, 3.0, 2.0, 1.0], "item": ["a", "b", "ç", ""],
                      "candidates": [["u", "v"], ["v"], [], ["w"]]})  # fmt: skip


def damaged(whole):
    """Bits flipped, bytes set, cut off, cut out, put in, put twice: one or several of them."""
    place = st.integers(0, len(whole))

    def apply(content, edit):
        kind, a, b, new = edit
        a, b = sorted((min(a, len(content)), min(b, len(content))))
        if kind == "flip" and a < len(content):
            return content[:a] + bytes([content[a] ^ (1 << new[0] % 8 if new else 1)]) + content[a + 1 :]
        if kind == "set":
            return content[:a] + new + content[a + len(new) :]
        return {
            "cut": content[:a],
            "out": content[:a] + content[b:],
            "in": content[:a] + new + content[a:],
            "twice": content[:b] + content[a:],
            "zero": content[:a] + bytes(min(8, b - a)) + content[a + min(8, b - a) :],
        }.get(kind, content)

    def build(edits):
        content = whole
        for edit in edits:
            content = apply(content, edit)
        return content

    kinds = st.sampled_from(["flip", "flip", "flip", "set", "cut", "out", "in", "twice", "zero"])
    edits = st.lists(st.tuples(kinds, place, place, st.binary(max_size=4)), min_size=1, max_size=3)
    return edits.map(build)


def written(write):
    """The bytes of what `write(path)` writes."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "file"))
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


@QUIET
@fuzz(60, 1000)
@given(damaged(written(lambda path: write_table(FRAME, path.with_suffix(".parquet")))) | st.binary(max_size=60))
def test_parquet(attempt, folder, content):
    """A .parquet has no checksum: a changed cell is not seen, but nothing breaks."""
    path = folder / "t.parquet"
    path.write_bytes(content)
    attempt("a .parquet table", lambda: read_table(path))
    attempt("training on a .parquet table", lambda: learned_from(path))


@QUIET
@fuzz(100, 1500)
@given(st.sampled_from(["csv", "parquet", "json"]), st.data())
def test_what_is_written_is_read_back(attempt, folder, form, data):
    names = data.draw(st.lists(TEXT.filter(bool), min_size=1, max_size=3, unique=True))
    n = data.draw(st.integers(0, 4))
    cells = data.draw(st.sampled_from([WORDS, st.lists(WORDS, max_size=3)])) if form != "csv" else WORDS
    frame = pd.DataFrame({name: data.draw(st.lists(cells, min_size=n, max_size=n)) for name in names}, dtype=object)
    path = folder / f"back.{form}"

    def there_and_back():
        write_table(frame, path)
        return read_table(path)

    back = attempt(f"a .{form} table written and read", there_and_back)
    if back is None:  # what is no text cannot be in a file of text
        assert any(SURROGATE.search("".join(cell)) for name in names for cell in frame[name])
    else:
        assert list(back) == names if n or form != "json" else not len(back)
        for name in back:
            assert [list(c) if isinstance(c, np.ndarray) else c for c in back[name]] == frame[name].tolist()


# ---- our own files ---------------------------------------------------------------------------------------

SETS = generate(torch.arange(40) % 5, 5, 0.3, 0.3, seed=1)
ARRAYS_KEPT = {
    "x": np.arange(12.0).reshape(4, 3),
    "candidates": np.array(["a|b", "b", "", "c"]),
    "empty": np.empty((0, 2)),
}
RECORD = {"epoch": 3, "loss": 0.25, "val": None, "names": ["a", "ç"], "deep": {"on": True}}
STATE = {
    "method": {"S": torch.rand(4, 3) < 0.5, "l": torch.rand(4, 3)},
    "state": {"epoch": 2, "history": [{"loss": 0.5}]},
}
PACKED = {"bits": np.packbits(SETS.mask.numpy()), "shape": np.array([40, 5]),
          "about": np.array(json.dumps(SETS.about | {"sha256": SETS.sha256}))}  # fmt: skip
OWN = {"x": np.arange(8.0).reshape(4, 2), "candidates": np.array(["a|b", "b", "", "c"]), "item": np.arange(4)}
PLAIN = (
    hnp.arrays(hnp.scalar_dtypes(), SHAPES)
    | hnp.arrays(np.int64, (2,), elements=st.integers(-1, 6))
    | st.sampled_from(["{}", "[]", "", '{"sha256": 1}', "[" * 100_000]).map(np.array)
    | st.sampled_from(
        [
            SETS.mask.numpy(),
            np.array([np.inf, 2]),
            np.array([2**40, 2**40]),
            np.eye(4),
            np.zeros((4, 9, 9)),
            SETS.mask[:4].numpy(),
            np.array([0, 1, 2, 1]),
            np.array(["b", "c", "a"]),
            np.array([1, 1, 2, 3]),
        ]
    )
)


def npz(arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def replaced(arrays):
    """Some of the arrays are others."""
    return st.dictionaries(st.sampled_from([*arrays, "classes"]), PLAIN, max_size=2).map(lambda odd: npz(arrays | odd))


@QUIET
@fuzz(100, 2500)
@given(damaged(written(SETS.save)) | st.binary(max_size=60) | replaced(PACKED))
def test_candidate_sets(attempt, folder, content):
    path = folder / "sets.npz"
    path.write_bytes(content)
    sets = attempt("a file of candidate sets", lambda: CandidateSets.load(path))
    if sets is not None:
        assert torch.equal(sets.mask, SETS.mask) and sets.about == SETS.about


@QUIET
@fuzz(100, 2000)
@given(damaged(npz(ARRAYS_KEPT)) | st.binary(max_size=60))
def test_arrays(attempt, folder, content):
    path = folder / "x.npz"
    path.write_bytes(content)
    read = attempt("an .npz file", lambda: read_npz(path))
    if read is not None:
        assert read.keys() == ARRAYS_KEPT.keys()
        assert all(a.dtype == read[k].dtype and np.array_equal(a, read[k]) for k, a in ARRAYS_KEPT.items())


@QUIET
@fuzz(80, 1500)
@given(replaced(OWN))
def test_training_on_arrays(attempt, folder, content):
    path = folder / "own.npz"
    path.write_bytes(content)
    loaded = attempt("training on an .npz file", lambda: load_source({"npz": str(path)}))
    assert loaded is None or len(loaded.items) == len(loaded.dataset.x) == len(loaded.dataset.S)


@QUIET
@fuzz(80, 1500)
@given(damaged(written(lambda path: checkpoint.save(path, STATE))) | st.binary(max_size=60))
def test_checkpoint(attempt, folder, content):
    path = folder / "last.ckpt"
    path.write_bytes(content)
    state = attempt("a checkpoint", lambda: checkpoint.load(path))
    if state is not None:
        assert_same(state, STATE)


PAYLOAD = written(lambda path: checkpoint.save(path, STATE))[32:]


@QUIET
@fuzz(80, 1500)
@given(damaged(PAYLOAD) | st.binary(max_size=60))
def test_checkpoint_with_a_right_checksum(attempt, folder, content):
    import hashlib

    path = folder / "last.ckpt"
    path.write_bytes(hashlib.sha256(content).digest() + content)
    attempt("a checkpoint of another's making", lambda: checkpoint.load(path))


@QUIET
@fuzz(100, 2000)
@given(
    damaged(json.dumps(sealed(RECORD)).encode()) | st.binary(max_size=40) | CELLS.map(lambda v: json.dumps(v).encode())
)
@example(b"[" * 100_000)
def test_sealed_record(attempt, folder, content):
    path = folder / "result.json"
    path.write_bytes(content)
    record = attempt("a sealed record", lambda: read_json(path))
    if record is not None and b'"sha256"' in content:
        assert record == RECORD


def test_every_bit_of_a_sealed_record(attempt):
    whole = json.dumps(sealed(RECORD)).encode()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        record = attempt("a bit of a sealed record", lambda flipped=flipped: unseal(bytes(flipped), "here"))
        assert record is None or record == RECORD


# ---- settings, grids, commands ---------------------------------------------------------------------------

OPTIONS = sorted({*vars(Training()), *(name for kind in METHODS.values() for name in vars(kind.Config()))})
VALUES_SET = st.one_of(
    st.sampled_from(["1", "0", "-1", "1e400", "NaN", "Infinity", "1" + "0" * 400, "1" + "0" * 5000, "true", "null",
                     "[]", "{}", '"fast"', "fast", "mlp", "", "[" * 100_000, "1e-300", "1e300", "0.5", "\ud800"]),
    st.integers().map(str), st.floats().map(str), WORDS, (CELLS | COLUMNS).map(json.dumps),
)  # fmt: skip
SETTING = st.builds("{}={}".format, st.sampled_from(OPTIONS) | WORDS, VALUES_SET) | WORDS
USUAL_VALUES = st.sampled_from(["0", "1", "2", "0.5", "1e-3", "100", "true", "false", "weak", "linear", "mae"])


@st.composite
def settings_of(draw):
    method = draw(st.sampled_from([*METHODS]))
    own = st.sampled_from([*vars(Training()), *vars(METHODS[method].Config())])
    usual = st.builds("{}={}".format, own, USUAL_VALUES | VALUES_SET)
    return method, draw(st.sampled_from([*RECIPES]) | WORDS), draw(st.lists(usual | SETTING, max_size=2))


@QUIET
@fuzz(150, 3000)
@given(settings_of())
@example(("urrl", "fast", ["w_m=1" + "0" * 400]))  # beyond all floats
@example(("urrl", "fast", ["k=" + "[" * 100_000]))
def test_settings(attempt, chosen):
    method, recipe, words = chosen

    def resolved():
        values = parse_settings(words)
        return resolve("digits", method, recipe, METHODS[method].Config, values, eta=0.3, mu=0.3, convention="paper",
                       seed=0, split="paper", subset=30)  # fmt: skip

    run = attempt("--set", resolved)
    if run is not None:
        assert isinstance(run, Run)
        json.dumps(run.to_dict(), allow_nan=False)


TOML_VALUES = st.recursive(
    st.one_of(
        st.booleans().map(lambda b: str(b).lower()), st.integers().map(str), st.floats().map(str), TEXT.map(json.dumps),
        st.sampled_from(["2020-01-01", "1e400", "inf", "1" + "0" * 400, "0x10", "{a = 1}", "0.3", "1", "30"]),
    ),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"), max_leaves=4,
)  # fmt: skip
TOML_KEYS = st.sampled_from([*KEYS, "set", *(f"set.{name}" for name in ("phi", "width", "lr", "epochs", "net"))])
TOML_PAIRS = [("eta", "[0.1, 0.3]"), ("mu", "0"), ("seed", "[3, 10]"), ("method", '"proden"'), ("epochs", "[1, 2]"),
              ("set.width", "[2, 3]"), ("set.lr", "1e-3"), ("convention", '"swap"'), ("split", '"fold:1"')]  # fmt: skip
TOML = st.one_of(
    st.text(max_size=40),
    st.binary(max_size=20),
    st.lists(st.tuples(TOML_KEYS | TEXT.map(json.dumps), TOML_VALUES) | st.sampled_from(TOML_PAIRS), max_size=4).map(
        lambda pairs: "\n".join(['dataset = "digits"', "subset = 30", *(f"{key} = {value}" for key, value in pairs)])
    ),
)


@QUIET
@fuzz(60, 1000)
@given(TOML)
@example("a = " + "[" * 100_000)
@example(
    'dataset = "digits"\n' + "\n".join(f"set.{name} = {[*range(1, 40)]}" for name in ("lr", "w_m", "w_cr", "k", "tau"))
)
def test_grid(attempt, folder, content):
    path = folder / "grid.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    cells = attempt("a grid file", lambda: read_grid(str(path), {}))
    assert cells is None or (cells and all(isinstance(cell.run, Run) and cell.name for cell in cells))


ARGUMENTS = TEXT.filter(lambda word: "\0" not in word) | st.sampled_from(
    ["\udcff", "--", "-1", "--out=", "-h", "--set"]
)
PATHS = st.sampled_from(
    ["new/a", "new/a.npz", "new/a.csv", "new/a.png", "run", "folder", "file", "file/x", "t.csv", "t.json", "own.npz",
     "x.npy", "x.npz", "sets.npz", "grid.toml", "pictures", "pictures.csv", ".", "", "no\nsuch", "\udcff", "x" * 300]
)  # fmt: skip
NUMBER = (
    st.integers(-2, 40).map(str) | st.floats(0, 1).map(str) | st.sampled_from(["1e400", "nan", "9" * 400, "1_0", "x"])
)
CONVENTION = st.sampled_from(["paper", "pico+", "swap", "fredis", "clean", "clean-forced"]) | ARGUMENTS
HEAVY = ("width", "embed_dim", "epochs", "compile", "net")  # minutes of work; test_settings has them
LIGHT = SETTING.filter(
    lambda text: text.partition("=")[0] not in HEAVY and "\0" not in text and not SURROGATE.search(text)
)
CELL = {"--dataset": st.sampled_from(["digits", "lost", "cifar10"]) | ARGUMENTS, "--eta": NUMBER, "--mu": NUMBER,
        "--convention": CONVENTION, "--seed": NUMBER, "--split": st.sampled_from(["paper", "fold:3", "official", "x"]),
        "--subset": st.integers(-1, 50).map(str) | ARGUMENTS, "--data-dir": PATHS}  # fmt: skip
MACHINE = {"--device": st.sampled_from(["cpu", "auto", "cuda", "cpu:9", "meta", "", "x"]),
           "--threads": st.sampled_from(["1", "0", "-1", "999999", "x"]), "--quiet": None}  # fmt: skip
METHOD = st.sampled_from([*METHODS, "PiCO+", "cr-dpll"]) | ARGUMENTS
SOURCES = st.sampled_from([
    ["--dataset", "digits", "--subset", "30"], ["--table", "t.csv", "--candidates", "candidates"], ["--npz", "own.npz"],
    ["--images", "pictures", "--candidates", "pictures.csv"], ["--dataset", "digits", "--subset", "7"], [],
])  # fmt: skip
COMMANDS: dict[str, tuple[list[st.SearchStrategy], dict[str, st.SearchStrategy | None]]] = {
    "train": (
        [SOURCES, st.just(["--epochs", "1", "--quiet", "--threads", "1", "--set", "width=2", "--out", "new/run"])],
        {"--method": METHOD, "--recipe": st.sampled_from(["fast", "paper"]) | ARGUMENTS, "--set": LIGHT, "--out": PATHS,
         "--candidates": PATHS, "--classes": ARGUMENTS, "--features": ARGUMENTS, "--skip-bad": None, "--resume": None,
         "--table": PATHS, "--npz": PATHS, "--images": PATHS, **CELL, **MACHINE},
    ),
    "bench": (
        [st.sampled_from(["grid.toml", "t.csv", "paper:cifar10"]), st.just(["--out", "new/b", "--dry-run"])],
        {"--methods": METHOD, "--datasets": ARGUMENTS, "--seeds": NUMBER, "--recipe": ARGUMENTS, "--set": LIGHT,
         "--subset": NUMBER, "--data-dir": PATHS, "--jobs": NUMBER, "--engine": ARGUMENTS, "--retry-failed": None,
         **MACHINE},
    ),
    "report": ([PATHS], {"--out": PATHS, "--data-dir": PATHS}),
    "generate": ([st.just(["--dataset", "digits", "--out", "new/s.npz"])], {"--out": PATHS, **CELL}),
    "predict": ([st.just("run") | PATHS, PATHS, st.just(["--out", "new/p.csv"])],
                {"--out": PATHS, "--skip-bad": None, **MACHINE}),
    "audit": ([st.just("run") | PATHS, st.just(["--out", "new/audit"])],
              {"--out": PATHS, "--format": st.sampled_from(["csv", "json", "parquet", "x"]), **MACHINE}),
    "export": ([PATHS.filter("run".__ne__)], {"--onnx": PATHS, "--torch": PATHS}),  # a good one takes seconds
    "demo": ([st.just(["--quiet"])], {"--out": PATHS, **MACHINE}),
    "show-augment": ([st.just(["--dataset", "digits", "--out", "new/v.png"])],
                     {"--dataset": ARGUMENTS, "--data-dir": PATHS, "--seed": NUMBER, "--out": PATHS}),
    "methods": ([], {}),
    "datasets": ([], {}),
    "recipes": ([], {}),
}  # fmt: skip


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from([*COMMANDS]))
    places, options = COMMANDS[command]
    words = [command]
    for place in places:
        drawn = draw(place)
        words += drawn if isinstance(drawn, list) else [drawn]
    for name in draw(st.lists(st.sampled_from([*options]), max_size=3)) if options else []:
        value = options[name]
        words += [name] if value is None else [name, draw(value)]
    return words + draw(st.just([]) | st.lists(ARGUMENTS, max_size=2))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a finished run and some data of every kind, and no way to the network."""
    rng = np.random.default_rng(0)
    with contextlib.chdir(tmp_path_factory.mktemp("commands")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("URRL_DATA", "folder")
        patch.setenv("XDG_CACHE_HOME", "folder")
        patch.setattr("urrl.data.download.urlopen", _no_network)
        patch.setattr(urrl.demo, "make_run", _tiny)
        Path("folder").mkdir()
        Path("pictures").mkdir()
        Path("file").write_text("no data\n")
        Path("grid.toml").write_text('dataset = "digits"\nsubset = 30\nepochs = 1\nset.width = [2, 3]\n')
        write_table(pd.DataFrame(good_rows()), Path("t.csv"))
        write_table(pd.DataFrame(good_rows()), Path("t.json"))
        Path("own.npz").write_bytes(npz(OWN))
        np.save("x.npy", rng.integers(0, 256, (3, 8, 8), np.uint8))
        np.savez("x.npz", x=rng.integers(0, 256, (3, 8, 8), np.uint8))
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (9, 9), np.uint8)).save(f"pictures/{i}.png")
        Path("pictures.csv").write_text("item,candidates\n0.png,a|b\n1.png,b\n2.png,a\n3.png,\n")
        small = ["--subset", 30, "--epochs", 1, "--set", "width=2", "--threads", 1, "--quiet"]
        assert call("train", "--dataset", "digits", "--out", "run", *small).code == 0
        assert call("generate", "--dataset", "digits", "--subset", 30, "--out", "sets.npz").code == 0
        yield Path.cwd()


def _no_network(*_, **__):
    raise URLError("no network")


def _tiny(dataset, method, recipe, options, **cell):
    return make_run(dataset, method, recipe, {"epochs": 1, "width": 2}, subset=30, **cell)


@QUIET
@fuzz(25, 600)
@given(command_lines())
def test_command_line(count, place, words):
    figures = dict.fromkeys(("results", "clean_errors", "tracebacks"), 0)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            shutil.copytree(place, folder, dirs_exist_ok=True)
            done = call(*words)
        assert done.code in (0, 1, 2)
        figures["clean_errors" if done.code else "results"] = 1
    finally:
        figures["tracebacks"] = 1 - sum(figures.values())
        count("fuzzed inputs: the command line", **figures)
    if done.code:
        lines = [line for line in done.err.splitlines() if not line.startswith("urrl: skipped: ")]
        assert len(lines) == 1 and lines[0].startswith("urrl: ") and lines[0].isprintable(), done.err


# ---- the estimator ---------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(0, 8), st.integers(0, 4))
REALS = st.floats(-9, 9) | st.floats() | st.sampled_from([1e300, -1e38, 1e-300, 0.0])
PLAIN_ITEMS = st.one_of(
    hnp.arrays(np.float32, (8, 3), elements=st.floats(-9, 9, width=32)),
    hnp.arrays(np.float64, st.tuples(st.integers(2, 9), st.integers(1, 4)), elements=st.floats(-1e30, 1e30)),
    hnp.arrays(np.float64, (1, 3), elements=st.floats(-9, 9)).map(lambda x: x.repeat(6, 0)),  # all rows alike
    hnp.arrays(np.int64, (5, 2)),
    hnp.arrays(np.uint8, st.sampled_from([(4, 9, 9), (6, 4, 5, 3), (5, 1, 1), (4, 9, 9, 2), (3, 2, 40)])),
)
ODD_ITEMS = st.one_of(
    hnp.arrays(np.float64, SIZES, elements=REALS),
    hnp.arrays(object, SIZES, elements=SCALARS),
    hnp.arrays(object, SIZES, elements=WORDS),
    hnp.arrays(np.uint8, st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))),
    NESTED,
    ARRAYS,
)


def plain_sets(n):
    usual = st.sampled_from(["a", "b", "c", "a|b", "", ("a",), ("b", "c"), ()])
    return st.one_of(
        st.lists(usual, min_size=n, max_size=n),
        hnp.arrays(bool, (n, 3)),
        hnp.arrays(np.int64, n, elements=st.integers(0, 2)),
    )


PARAMETERS: dict[str, st.SearchStrategy] = {
    "batch_size": st.integers(-1, 9) | SCALARS,
    "lr": REALS | SCALARS,
    "classes": st.just(["a", "b", "c"]) | NESTED,
    "validation_fraction": st.floats(0, 1) | SCALARS,
    "options": st.dictionaries(st.sampled_from(OPTIONS).filter(lambda name: name not in HEAVY), CELLS, max_size=2)
    | NESTED,
    "random_state": st.integers(0, 9) | SCALARS,
    "n_jobs": st.integers(-3, 3) | st.just(10**6) | SCALARS,
    "device": st.sampled_from(["cpu", "auto", "meta", "cuda:7", "x"]) | SCALARS,
    "augment": st.none() | SCALARS,
    "phi": st.just("auto") | REALS | SCALARS,
}


@st.composite
def fits(draw):
    """(method, parameters, X, y), of which one thing is odd, or two, or none."""
    odd = draw(st.sampled_from(["X", "y", "parameters", "parameters", "nothing"]))
    x = draw(ODD_ITEMS if odd == "X" else PLAIN_ITEMS)
    n = len(x) if isinstance(x, list) or (isinstance(x, np.ndarray) and x.ndim) else 3
    y = draw(st.lists(NESTED, min_size=n, max_size=n) | NESTED | ARRAYS if odd == "y" else plain_sets(n))
    method = draw(st.sampled_from(["urrl", *METHODS]))
    names = draw(st.lists(st.sampled_from([*PARAMETERS]), max_size=2, unique=True)) if odd == "parameters" else []
    return method, {name: draw(PARAMETERS[name]) for name in names if name != "phi" or method == "urrl"}, x, y


@QUIET
@fuzz(30, 800)
@given(fits())
def test_estimator(attempt, fit):
    method, parameters, x, y = fit

    def fitted():
        parameters.setdefault("random_state", 0)
        own = {"epochs": 1, "width": 4, **parameters}
        kind = URRLClassifier(**own) if method == "urrl" else PartialLabelClassifier(method, **own)
        return kind.fit(x, y)

    threads = torch.get_num_threads()
    found = attempt("the estimator", fitted, (ValueError, TypeError))
    assert torch.get_num_threads() == threads
    if found is None:
        return
    l, S = found.label_distributions_, found.candidates_
    assert np.isfinite(l).all() and (l[~S] == 0).all() and np.allclose(l.sum(1), 1, atol=1e-5)
    p = found.predict_proba(x)
    assert np.isfinite(p).all() and p.shape == l.shape and np.isfinite(found.transform(x)).all()
    assert set(found.predict(x).tolist()) <= set(found.classes_.tolist())
    assert 0 <= found.score(x, y) <= 1


# ---- what was found by reading ---------------------------------------------------------------------------


def test_a_name_that_no_terminal_shows(tmp_path, monkeypatch):
    path = tmp_path / "\udcff\n.npz"
    written_to = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", written_to)
    monkeypatch.setattr(sys, "argv", ["urrl", "generate", "--dataset", "digits", "--out", str(path)])
    assert main() == 0 and len(CandidateSets.load(path)) == 1198


def test_file_names_that_are_no_text_are_predicted(place, tmp_path):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a\rb.png")
    shutil.copy(tmp_path / "a\rb.png", tmp_path / "\udcff.png")
    assert call("predict", place / "run", tmp_path, "--out", tmp_path / "p.csv", "--quiet").code == 0
    assert sorted(read_table(tmp_path / "p.csv")["item"]) == ["\\udcff.png", "a\rb.png"]


def test_bad_rows_are_skipped_in_one_go(tmp_path):
    rows = [f"{i},{'a||' if i % 3 else 'a'}{i},{i}" for i in range(6_000)]
    (tmp_path / "t.csv").write_text("\n".join(["item,candidates,x1", *rows]))
    began = time.process_time()
    loaded = learned_from(tmp_path / "t.csv", skip_bad=True)
    assert len(loaded.items) == 2000 and len(loaded.skipped) == 4000 and time.process_time() - began < 5


def test_parameters_of_a_search():
    x = np.random.default_rng(0).normal(size=(12, 3))
    found = PartialLabelClassifier("proden").set_params(epochs=np.int64(1), lr=np.float32(0.5)).fit(x, [0, 1, 2] * 4)
    assert found.run_.training.epochs == 1 and found.run_.training.lr == 0.5
    with PartialLabelClassifier("proden", n_jobs=10**6)._threads():
        assert torch.get_num_threads() <= (os.cpu_count() or 1)


def test_photographs_fewer_than_filters():
    x = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), np.uint8)
    assert URRLClassifier(epochs=1, width=2, random_state=0).fit(x, list("abcabc")).candidates_.shape == (6, 3)


def test_a_training_that_diverges():
    x = np.random.default_rng(0).normal(size=(12, 3))
    with pytest.raises(UserError, match="a smaller lr may help"):
        PartialLabelClassifier("proden", epochs=3, lr=1e30, random_state=0).fit(x, [0, 1, 2] * 4)
