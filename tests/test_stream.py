"""Images that stay on the disk train as a tensor of them does, bit for bit."""

import dataclasses
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import processes
from tests.runs import assert_same, call, outcome, without
from urrl.candidates import generate
from urrl.data import load
from urrl.data.own import from_arrays, own_policy
from urrl.data.stream import from_files, from_parquet, from_tar, rows_of
from urrl.errors import UserError
from urrl.run import make_own_run, train

N = 60
SIZE = (1, 8, 8)


def png(image) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.squeeze(0).numpy()).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def digits():
    data = load("digits")
    return data.x[:N], data.truth[:N]


def write_files(x, folder: Path) -> list[Path]:
    for i, image in enumerate(x):
        (folder / f"{i:03}.png").write_bytes(png(image))
    return sorted(folder.iterdir())


def write_tar(x, folder: Path) -> list[Path]:
    """Two shards with a label beside each image, as WebDataset has them."""
    shards = [folder / "a.tar", folder / "b.tar"]
    for shard, part in zip(shards, x.chunk(2)):
        with tarfile.open(shard, "w") as tar:
            for i, image in enumerate(part):
                for suffix, content in (("png", png(image)), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{i:03}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return shards


def write_parquet(x, folder: Path) -> list[Path]:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shards = [folder / "a.parquet", folder / "b.parquet"]
    for shard, part in zip(shards, x.chunk(2)):
        rows = [{"bytes": png(image), "path": "x"} for image in part]
        pq.write_table(pa.table({"image": rows, "label": [7] * len(rows)}), shard, row_group_size=7)
    return shards


KINDS = {
    "files": lambda x, folder: from_files(write_files(x, folder), SIZE),
    "tar": lambda x, folder: from_tar(write_tar(x, folder), SIZE),
    "parquet": lambda x, folder: from_parquet(write_parquet(x, folder), "image", SIZE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_a_tensor(kind, digits, tmp_path):
    x, _ = digits
    streamed = KINDS[kind](x, tmp_path)
    assert streamed.shape == x.shape and len(streamed) == N
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    wanted: list[slice | torch.Tensor] = [order[:7], slice(5, 40), order[7:7], order[7:]]
    before = torch.get_rng_state()
    for got, expected in zip(rows_of(streamed, wanted), rows_of(x, wanted), strict=True):
        assert got.dtype == torch.uint8 and torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), before)  # the loop's draws do not depend on where the images are
    assert torch.equal(streamed[11], x[11])
    part = streamed[order[:20]]
    assert torch.equal(next(part.batches([slice(3, 9)])), x[order[:20]][3:9])
    assert torch.equal(streamed.small(), x)  # they are small


def test_images_are_scaled_and_looked_at_small(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(rng.integers(0, 256, (70, 100, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    streamed = from_files(sorted(tmp_path.iterdir()), (3, 64, 64), workers=0)
    assert next(streamed.batches([slice(0, 3)])).shape == (3, 3, 64, 64)
    assert streamed.small().shape == (3, 3, 32, 32)
    assert own_policy(streamed).mean == pytest.approx([0.5] * 3, abs=0.05)


def _learn(x, y, folder):
    data = from_arrays(x, generate(y, 10, 0.2, 0.1).mask, range(10), y, augment="digits")
    settings = {"epochs": 2, "width": 2, "batch_size": 20, "lr": 0.02, "sync_bn": True, "start": "vote"}
    run, splits, sets = make_own_run(data, "urrl", settings, seed=0)
    train(run, data, splits, sets, folder, device="cpu")


def test_a_run_is_the_same(digits, tmp_path):
    x, y = digits
    (tmp_path / "images").mkdir()
    streamed = KINDS["files"](x, tmp_path / "images")
    _learn(x[:, 0], y, tmp_path / "memory")
    _learn(streamed, y, tmp_path / "disk")
    memory, disk = outcome(tmp_path / "memory"), outcome(tmp_path / "disk")
    for run in (memory, disk):
        run.pop("config")  # has the hash of the pixels, or of the files' names
    assert_same(memory, disk)

    processes.values(2, _learn, dataclasses.replace(streamed, workers=0), y, tmp_path / "two")
    two = without(outcome(tmp_path / "two")["result"], "train_flops", "processes")
    for key, value in two.items():
        assert value == (
            pytest.approx(disk["result"][key], rel=1e-4) if isinstance(value, float) else disk["result"][key]
        )


def test_bad_files_are_named(digits, tmp_path):
    x, _ = digits
    paths = write_files(x[:5], tmp_path)
    paths[3].write_bytes(b"no image")
    with pytest.raises(UserError, match=r"003\.png: not an image"):
        list(from_files(paths, SIZE).batches([slice(0, 2), slice(2, 5)]))
    with pytest.raises(UserError, match=r"gone\.png: no such file"):
        list(from_files([tmp_path / "gone.png"], SIZE, workers=0).batches([slice(0, 1)]))
    for read in (from_tar, lambda shards, size: from_parquet(shards, "image", size)):
        with pytest.raises(UserError, match=r"003\.png: not a"):
            read([paths[3]], SIZE)
        with pytest.raises(UserError, match="gone: no such file"):
            read([tmp_path / "gone"], SIZE)
    with pytest.raises(UserError, match="no images"):
        from_files([], SIZE)


def test_command_line(digits, tmp_path):
    x, y = digits
    (tmp_path / "images").mkdir()
    paths = write_files(x, tmp_path / "images")
    rows = [f"{path.name},{label}|{(label + 1) % 10}" for path, label in zip(paths, y.tolist())]
    (tmp_path / "labels.csv").write_text("\n".join(["item,candidates", *rows]) + "\n")
    arguments = ["train", "--images", tmp_path / "images", "--candidates", tmp_path / "labels.csv", "--quiet"]
    arguments += ["--epochs", 1, "--set", "width=2", "--threads", 1]
    for name, stream in (("memory", []), ("disk", ["--stream"])):
        done = call(*arguments, *stream, "--out", tmp_path / name)
        assert done.code == 0, done.err
    memory, disk = outcome(tmp_path / "memory"), outcome(tmp_path / "disk")
    for run in (memory, disk):
        run.pop("config")
    assert_same(memory, disk)
    paths[3].write_bytes(b"no image")
    done = call(*arguments, "--stream", "--out", tmp_path / "bad")
    assert done.code == 2 and done.err.count("\n") == 1 and f"{paths[3].name}: not an image" in done.err
