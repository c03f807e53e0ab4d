"""Files that mean harm: nothing in them runs, memory stays bounded, and the error names the file."""

import csv
import hashlib
import io
import json
import pickle
import resource
import shutil
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.browser import browse, needs_browser
from tests.processes import CONTEXT
from tests.runs import TINY, call
from urrl import checkpoint
from urrl.bench import read_grid
from urrl.data.stream import open_image
from urrl.errors import UserError
from urrl.files import write_json


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert call(*TINY, "--out", folder).code == 0
    return folder


def refused(count, kind: str, name: object, *arguments: object) -> None:
    done = call(*arguments)
    assert done.code == 2 and done.err.count("\n") == 1 and str(name) in done.err, done
    count(f"hostile file: {kind}", clean_errors=1, tracebacks=0, executed=0)


# ---- what would execute --------------------------------------------------------------------------------------


def test_pickles_in_arrays(whole, tmp_path, count):
    touched = tmp_path / "executed"
    evil = np.array([Evil(touched)] * 20, dtype=object)
    np.savez(tmp_path / "x.npz", x=evil, candidates=np.arange(20) % 3)
    np.savez(tmp_path / "c.npz", x=np.zeros((20, 3)), candidates=evil)
    np.savez(tmp_path / "sets.npz", bits=evil, shape=evil, about=evil)
    np.save(tmp_path / "x.npy", evil)
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Evil(touched)))
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Evil(touched)))
    for name in ("x.npz", "c.npz", "plain.npz"):
        refused(count, "pickle in an array", name, "train", "--npz", tmp_path / name, "--out", tmp_path / "run")
    for name in ("sets.npz", "plain.npz"):
        refused(count, "pickle in an array", name, *TINY, "--candidates", tmp_path / name, "--out", tmp_path / "run")
    for name in ("x.npz", "x.npy", "plain.npy"):
        refused(count, "pickle in an array", name, "predict", whole, tmp_path / name, "--out", tmp_path / "out.csv")
    assert not touched.exists() and not (tmp_path / "run").exists()
    pickle.loads((tmp_path / "plain.npz").read_bytes())
    assert touched.exists()  # it would have


def test_a_postscript_file_that_calls_itself_an_image(tmp_path, count):
    """Pillow would hand it to Ghostscript, a programming language."""
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    with Image.open(path) as image:
        assert image.format == "EPS"  # it would
    (tmp_path / "labels.csv").write_text("item,candidates\na.png,x\nb.png,y\n")
    refused(count, "postscript", "a.png", "train", "--images", tmp_path, "--candidates", tmp_path / "labels.csv")


def test_names_that_leave_the_folder_of_images(tmp_path, count):
    images = tmp_path / "images"
    images.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "private.png")
    for item in ("../private.png", str(tmp_path / "private.png"), "a/../../private.png", "a\0b.png"):
        pd.DataFrame({"item": [item], "candidates": ["x|y"]}).to_parquet(tmp_path / "labels.parquet")
        refused(count, "path that leaves its folder", "labels.parquet, row 0", "train", "--images", images,
                "--candidates", tmp_path / "labels.parquet")  # fmt: skip


# ---- what would fill the memory ------------------------------------------------------------------------------


def bomb(path: Path, member: str, size: int) -> None:
    """A zip with an array of `size` zero bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (size // 8, 8)})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
        packed.open(member, "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))


def grown(arguments: tuple, name: str) -> None:
    """In a process of its own: exit code 0 where the command is refused without taking much memory for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = call(*arguments)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    sys.exit(0 if done.code == 2 and done.err.count("\n") == 1 and name in done.err and grown < 400_000 else done.err)


def bounded(count, kind: str, name: str, *arguments: object) -> None:
    process = CONTEXT.Process(target=grown, args=(arguments, name))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0
    count(f"hostile file: {kind}", clean_errors=1, tracebacks=0, executed=0)


def test_archives_that_unpack_to_gigabytes(whole, tmp_path, times, count):
    size = times(1100, 6000) << 20
    bomb(tmp_path / "x.npz", "x.npy", size)
    assert (tmp_path / "x.npz").stat().st_size < size / 150
    bounded(count, "zip bomb", "x.npz", "train", "--npz", tmp_path / "x.npz", "--out", tmp_path / "run")
    bounded(count, "zip bomb", "x.npz", *TINY, "--candidates", tmp_path / "x.npz", "--out", tmp_path / "run")
    bounded(count, "zip bomb", "x.npz", "predict", whole, tmp_path / "x.npz", "--out", tmp_path / "out.csv")

    table = pa.table({f"x{i}": pa.array(np.zeros(1 << 20)) for i in range(4)} | {"c": ["a"] * (1 << 20)})
    with pq.ParquetWriter(tmp_path / "t.parquet", table.schema, compression="zstd") as writer:
        for _ in range(times(30, 150)):
            writer.write_table(table, row_group_size=1 << 20)
    bounded(count, "parquet bomb", "t.parquet", "train", "--table", tmp_path / "t.parquet", "--candidates", "c",
            "--out", tmp_path / "run")  # fmt: skip


def test_an_array_that_promises_more_than_it_has(whole, tmp_path, count):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**13, 8, 8)})
    (tmp_path / "x.npy").write_bytes(header.getvalue() + bytes(100))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as packed:
        packed.write(tmp_path / "x.npy", "x.npy")
    for name in ("x.npy", "x.npz"):
        bounded(count, "array that promises too much", name, "predict", whole, tmp_path / name, "--out", tmp_path / "o")


def test_a_checkpoint_that_unpacks_to_gigabytes(whole, tmp_path, times, count):
    """Its checksum is right, and torch would unpack it."""
    stored = io.BytesIO()
    torch.save({"weights": torch.zeros(times(300, 1500) << 18)}, stored)
    packed = io.BytesIO()
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    payload = packed.getvalue()
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "model.ckpt").write_bytes(hashlib.sha256(payload).digest() + payload)
    bounded(count, "checkpoint bomb", "model.ckpt", "predict", run, tmp_path / "x.npy", "--out", tmp_path / "o")


def test_a_checkpoint_with_tensors_of_absurd_shape(whole, tmp_path, count):
    """Ten numbers seen as a trillion."""
    state = checkpoint.load(whole / "model.ckpt")
    state["weights"] = {name: torch.zeros(1).expand(10**6, 10**6) for name in state["weights"]}
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    checkpoint.save(run / "model.ckpt", state)
    bounded(
        count, "checkpoint of absurd shape", "model.ckpt", "predict", run, tmp_path / "x.npy", "--out", tmp_path / "o"
    )


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 30_000, 2**31 - 1])
def test_images_of_absurd_size(tmp_path, side, count):
    (tmp_path / "a.png").write_bytes(png(side, side, bytes(1000)))
    (tmp_path / "labels.csv").write_text("item,candidates\na.png,x\nb.png,y\n")
    Image.new("L", (8, 8)).save(tmp_path / "b.png")
    arguments = ["train", "--images", tmp_path, "--candidates", tmp_path / "labels.csv", "--out", tmp_path / "run"]
    bounded(count, "image of absurd size", "a.png", *arguments)
    bounded(count, "image of absurd size", "a.png", *arguments, "--stream")


@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"])
def test_images_that_end_too_early_or_are_bent(tmp_path, form, times, count):
    """Pillow raises a dozen kinds of errors on them; we have one."""
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(buffer, form)
    content, errors, read = buffer.getvalue(), 0, 0
    for _ in range(times(40, 2000)):
        bent = bytearray(content[: rng.choice([len(content), int(rng.integers(1, len(content) + 1))])])
        for place in rng.integers(0, len(bent), rng.integers(0, 4)):
            bent[place] = rng.integers(256)
        try:
            assert open_image(bytes(bent), (8, 8), "a").size == (8, 8)
            read += 1
        except UserError as error:
            assert str(error).startswith("a: ") and "\n" not in str(error)
            errors += 1
    assert errors
    count("bent images", results=read, clean_errors=errors, tracebacks=0)


# ---- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"width": 4096}, {"embed_dim": 65536}, {"width": 10**18}, {"width": "2"}, {"width": None}, {"net": "<b>"},
        {"net": ["fast"]}, {"unknown": 1}, {"epochs": 10**300}, {"lr": float("nan")}, {"head": {"a": []}},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_with_absurd_values(whole, tmp_path, change, count):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    config.pop("sha256")
    (run / "config.json").write_text(json.dumps({**config, "training": {**config["training"], **change}}))
    bounded(count, "config with absurd values", "run", "predict", run, tmp_path / "x.npy", "--out", tmp_path / "o")
    bounded(count, "config with absurd values", "run", *TINY, "--out", run, "--resume")


@pytest.mark.parametrize(
    "lines",
    [
        "set.width = 4096", "seed = 1e999", "subset = 99999999999999999999", "epochs = 1000000000", "eta = nan",
        f"a = {'[' * 3000}{']' * 3000}", "set.lr = [{}]", "method = '\\u0000'"
    ],
    ids=lambda line: line[:20],
)  # fmt: skip
def test_a_grid_with_absurd_values(tmp_path, lines, count):
    (tmp_path / "g.toml").write_text(f'dataset = "digits"\n{lines}\n')
    arguments = ["bench", tmp_path / "g.toml", "--out", tmp_path / "out", "--dry-run", "--threads", 1]
    bounded(count, "grid with absurd values", "", *arguments)
    assert not (tmp_path / "out").exists()


# ---- what is shown and exported ------------------------------------------------------------------------------

EVIL = ["<img src=x onerror=\"document.title='owned'\">", "</script><script>document.title='owned'</script>",
        "{{ 7 * 7 }}", "=HYPERLINK(\"http://x\")", "+1+1", "-2", "@SUM(1)", "$\\frac{1}{0$"]  # fmt: skip


@needs_browser
def test_nothing_runs_on_the_report_page(tmp_path, whole, count):
    """Names of folders, data sets, methods and errors."""
    cell = read_grid("paper:fmnist", {"method": ["urrl"]})[0]
    for number, name in enumerate(EVIL[:4]):
        folder = tmp_path / "runs" / name.replace("/", "\u2215")
        folder.mkdir(parents=True)
        write_json(folder / "config.json", {**cell.run.to_dict(), "dataset": name, "method": name, "seed": number})
        write_json(folder / "error.json", {"error": name, "log": name})
    shutil.copytree(whole, tmp_path / "runs" / "good")
    assert call("report", tmp_path / "runs", "--out", tmp_path / "page.html").code == 0
    dom = browse(tmp_path / "page.html", "--dump-dom")
    assert "owned</title>" not in dom and "onerror=&quot;" not in dom.split("<body", 1)[0]
    assert "{{ 7 * 7 }}" in dom  # shown as it is
    count("page with hostile names: report", clean=1, executed=0)


def test_no_exported_cell_is_a_formula(tmp_path, count):
    """From the names of the classes and items in a user's table to predictions, issues and cleaned labels."""
    rng = np.random.default_rng(0)
    n, names = 60, EVIL[3:]
    y = np.arange(n) % len(names)
    frame = pd.DataFrame(rng.normal(size=(n, 3)) + 4 * np.eye(len(names), 3)[y], columns=["x1", "x2", "x3"])
    frame["item"] = [f"={i}" for i in range(n)]
    frame["labels"] = [[names[c], names[(c + 1) % len(names)]] for c in y]
    frame.to_parquet(tmp_path / "t.parquet")
    run = ["train", "--table", tmp_path / "t.parquet", "--features", "x*", "--candidates", "labels"]
    done = call(*run, "--epochs", 2, "--quiet", "--threads", 1, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert call("predict", tmp_path / "run", tmp_path / "t.parquet", "--out", tmp_path / "p.csv").code == 0
    assert call("audit", tmp_path / "run", "--out", tmp_path / "audit").code == 0
    cells = 0
    for path in [tmp_path / "p.csv", *(tmp_path / "audit").glob("*.csv")]:
        with open(path, newline="") as file:
            for row in csv.reader(file):
                for cell in row:
                    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r")), (path, cell)
                    cells += 1
    assert cells > 4 * n
    count("exported cells", clean=cells, formulas=0)
