"""Datasets: readers, where files are looked for, downloads, splits. No network but 127.0.0.1."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from urrl.data import DATASETS, Dataset, load, readers, split
from urrl.data.download import Source, locate, unpack
from urrl.data.readers import CIFAR10, CIFAR100, FMNIST, read_cifar, read_idx
from urrl.errors import UserError

REAL = os.environ.get("URRL_DATA")  # the tests below run without it; real CIFAR is tested where it points to


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and nothing of the user's environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("URRL_DATA", raising=False)


# --- files in the official layouts, made here ---


def idx(shape: tuple[int, ...], values: bytes, magic: int | None = None) -> bytes:
    header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape) if magic is None else magic, *shape)
    return gzip.compress(header + values)


def tiny_fmnist(folder: Path, train: int = 4, test: int = 2) -> Source:
    """The four files with a few rows each, pixels and labels counting up; returns a source that fits them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, official in FMNIST.files.items():
        rows = train if official == 60_000 else test
        values = bytes(i % 251 for i in range(rows * 784)) if "images" in name else bytes(range(rows))
        (folder / name).write_bytes(idx((rows, 28, 28) if "images" in name else (rows,), values))
        files[name] = rows
    return replace(FMNIST, files=files, installed=None)


def tiny_cifar(folder: Path, source: Source, label_bytes: int, rows: int = 3) -> Source:
    """Row i of a file has label i, all its pixels i + 100; a coarse label before it is 19."""
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join(bytes([19] * (label_bytes - 1) + [i] + [i + 100] * 3072) for i in range(rows))
    for name in source.files:
        (folder / name).write_bytes(data)
    return replace(source, files=dict.fromkeys(source.files, rows))


def pooled(rows: int, official_test: int = 0) -> Dataset:
    return Dataset("made", torch.zeros(rows, 1, 1, 1, dtype=torch.uint8), torch.arange(rows), (), official_test, "")


# --- readers ---


def test_read_idx(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(idx((2, 3, 4), bytes(range(24))))
    x = read_idx(path, (2, 3, 4))
    assert x.dtype == torch.uint8 and torch.equal(x, torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


GOOD = idx((2, 3), bytes(range(6)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD[:-12], "cannot read"),  # cut within the values
        (GOOD[:-4], "cannot read"),  # cut within gzip's own checksum
        (GOOD[:-8] + b"\0\0\0\0" + GOOD[-4:], "cannot read"),  # a wrong checksum
        (b"", "magic"),
        (b"<html>not found</html>", "cannot read"),
        (idx((2, 3), bytes(6), magic=0xD02), "magic"),  # floats, not bytes
        (idx((6,), bytes(6)), "magic"),  # another number of dimensions
        (idx((3, 2), bytes(6)), "2 x 3"),
        (idx((2, 3), bytes(5)), "2 x 3"),
        (idx((2, 3), bytes(7)), "2 x 3"),
    ],
)
def test_bad_idx_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        read_idx(path, (2, 3))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [1, 2])
def test_read_cifar(tmp_path: Path, labels: int) -> None:
    tiny_cifar(tmp_path, CIFAR100, labels)
    x, y = read_cifar(tmp_path / "train.bin", rows=3, classes=10, labels=labels)
    assert y.tolist() == [0, 1, 2] and y.dtype == torch.int64
    assert x.shape == (3, 3, 32, 32) and x.dtype == torch.uint8
    assert x.flatten(1).tolist() == [[100] * 3072, [101] * 3072, [102] * 3072]


def test_cifar_channels_are_planes(tmp_path: Path) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes([3]) * 1024)
    x, _ = read_cifar(path, rows=1, classes=10, labels=1)
    assert x[0].flatten(1).tolist() == [[1] * 1024, [2] * 1024, [3] * 1024]


def test_bad_cifar_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    good = bytes([3]) + bytes(3072)
    for content, says in [
        (good * 2, "size"),
        (good[:-1], "size"),
        (b"", "size"),
        (bytes([10]) + bytes(3072), "label 10"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=says) as caught:
            read_cifar(path, rows=1, classes=10, labels=1)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match=r"missing\.bin"):
        read_cifar(tmp_path / "missing.bin", rows=1, classes=10, labels=1)


# --- datasets by name ---


def test_digits() -> None:
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8) and data.x.dtype == torch.uint8 and data.x.is_contiguous()
    assert (int(data.x.min()), int(data.x.max())) == (0, 255)
    assert set(data.x.flatten().tolist()) == {round(v * 255 / 16) for v in range(17)}
    assert data.truth.dtype == torch.int64 and set(data.truth.tolist()) == set(range(10))
    assert (data.classes, data.official_test, data.augment) == (tuple("0123456789"), 0, "digits")


def test_fmnist_pools_train_then_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FMNIST", tiny_fmnist(tmp_path / "d"))
    data = load("fmnist", tmp_path / "d")
    assert data.x.shape == (6, 1, 28, 28) and data.x.is_contiguous() and data.official_test == 2
    assert data.truth.tolist() == [0, 1, 2, 3, 0, 1] and torch.equal(data.x[4:], data.x[:2])
    assert (len(data.classes), data.augment) == (10, "fmnist")


def test_fmnist_label_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FMNIST", tiny_fmnist(tmp_path, train=11))
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte\.gz: label 10"):
        load("fmnist", tmp_path)


@pytest.mark.parametrize(("name", "source", "labels"), [("cifar10", CIFAR10, 1), ("cifar100", CIFAR100, 2)])
def test_cifar_pools_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: Source, labels: int
) -> None:
    monkeypatch.setattr(readers, name.upper(), tiny_cifar(tmp_path / source.folders[0], source, labels))
    data = load(name, str(tmp_path))
    files = len(source.files)
    assert data.x.shape == (3 * files, 3, 32, 32) and data.x.is_contiguous() and data.official_test == 3
    assert data.truth.tolist() == [0, 1, 2] * files and data.augment == "cifar"
    assert len(set(data.classes)) == len(data.classes) == int(name[5:])


def test_official_files_must_be_whole(tmp_path: Path) -> None:
    tiny_cifar(tmp_path, CIFAR100, 2)  # well formed, but three rows are not 50,000
    with pytest.raises(UserError, match=r"train\.bin: wrong size"):
        load("cifar100", tmp_path)


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="digits, fmnist, cifar10, cifar100"):
        load("mnist")
    with pytest.raises(UserError, match="paper, official"):
        split(pooled(12), kind="random")


@pytest.mark.parametrize("name", DATASETS)
def test_data_dir_must_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="nowhere"):
        load(name, tmp_path / "nowhere")


# --- where files are looked for ---


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, env, cache, debian = (tmp_path / name for name in ("given", "env", "cache/urrl", "debian"))
    for place in (given, env, cache, debian):
        source = tiny_fmnist(place)
    source = replace(source, installed=debian)
    monkeypatch.setenv("URRL_DATA", str(env))
    for place in (given, env, cache, debian):
        assert locate(source, given) == place
        (place / "t10k-labels-idx1-ubyte.gz").unlink()  # a folder that lacks one file is passed over


@pytest.mark.parametrize("sub", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_sub_folders(tmp_path: Path, sub: str) -> None:
    source = tiny_fmnist(tmp_path / sub)
    assert locate(source, tmp_path) == tmp_path / sub


def test_cache_is_in_home_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tiny_cifar(tmp_path / ".cache/urrl/cifar-100-binary", CIFAR100, 2)
    assert locate(source) == tmp_path / ".cache/urrl/cifar-100-binary"


# --- downloads ---


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web site on this machine: its address and its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def urls(address: str, folder: Path) -> dict[str, str]:
    return {f"{address}/{p.name}": hashlib.md5(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def make_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def plain(name: str, content: bytes = b"content") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def test_download_files_once(tmp_path: Path, site: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = site
    source = replace(tiny_fmnist(folder), urls=urls(address, folder))
    monkeypatch.setattr(readers, "FMNIST", source)
    assert len(load("fmnist").truth) == 6
    cache = tmp_path / "cache/urrl"
    assert files_under(cache) == sorted(f"fashion-mnist/{name}" for name in source.files)
    for path in folder.iterdir():
        path.unlink()
    assert len(load("fmnist").truth) == 6  # from the cache: the site is empty now


def test_download_archive(tmp_path: Path, site: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = site
    source = tiny_cifar(tmp_path / "made", CIFAR100, 2)
    content = {name: (tmp_path / "made" / name).read_bytes() for name in source.files}
    members = [plain(f"cifar-100-binary/{name}", data) for name, data in content.items()]
    make_tar(folder / "cifar-100-binary.tar.gz", plain("cifar-100-binary/readme.txt"), *members)
    monkeypatch.setattr(readers, "CIFAR100", replace(source, urls=urls(address, folder)))
    assert load("cifar100").truth.tolist() == [0, 1, 2, 0, 1, 2]
    assert files_under(tmp_path / "cache") == [
        "urrl/cifar-100-binary/test.bin",
        "urrl/cifar-100-binary/train.bin",
    ]


@pytest.mark.parametrize("wrong", [0, -1])  # the first file, or the last after three good ones
def test_wrong_checksum_leaves_nothing(tmp_path: Path, site: tuple[str, Path], wrong: int) -> None:
    address, folder = site
    source = tiny_fmnist(folder)
    checksums = urls(address, folder)
    checksums[list(checksums)[wrong]] = "0" * 32
    with pytest.raises(UserError, match="wrong checksum") as caught:
        locate(replace(source, urls=checksums))
    assert list(checksums)[wrong] in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "cache/urrl").iterdir()) == []


@pytest.mark.parametrize("source", [FMNIST, CIFAR10], ids=["files", "archive"])
def test_no_network_says_what_to_put_where(tmp_path: Path, source: Source) -> None:
    address = "http://127.0.0.1:9"  # the discard port: nobody answers
    gone = {f"{address}/{os.path.basename(url)}": md5 for url, md5 in source.urls.items()}
    with pytest.raises(UserError) as caught:
        locate(replace(source, urls=gone, installed=None))
    message = str(caught.value)
    assert "\n" not in message and str(tmp_path / "cache/urrl" / source.folders[0]) in message
    assert all(name in message for name in source.files)
    assert ("apt-get install dataset-fashion-mnist" in message) == (source is FMNIST)
    assert files_under(tmp_path / "cache") == []


def test_missing_page_and_broken_archive(tmp_path: Path, site: tuple[str, Path]) -> None:
    address, folder = site
    with pytest.raises(UserError, match="404"):
        locate(replace(CIFAR100, urls={f"{address}/none.tar.gz": ""}))
    (folder / "a.tar.gz").write_bytes(gzip.compress(bytes(range(256)) * 8))
    with pytest.raises(UserError, match="cannot download"):
        locate(replace(CIFAR100, urls=urls(address, folder)))
    assert files_under(tmp_path / "cache") == []


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot download"):
        locate(CIFAR100)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    "bad",
    [
        plain("../out"),
        plain("d/../../out"),
        plain("/out"),
        link("d/a", "/etc/passwd"),
        link("d/b", "d/a", tarfile.LNKTYPE),
        link("d/pipe", "", tarfile.FIFOTYPE),
    ],
    ids=lambda bad: bad[0].name,
)
@pytest.mark.parametrize("first", [True, False])
def test_unsafe_archive_is_refused_whole(tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes], first: bool) -> None:
    archive, folder = tmp_path / "a.tar.gz", tmp_path / "folder"
    folder.mkdir()
    make_tar(archive, *((bad, plain("d/a")) if first else (plain("d/a"), bad)))
    with pytest.raises(UserError, match="unsafe member"):
        unpack(archive, ["d/a"], folder)
    assert files_under(tmp_path) == ["a.tar.gz"]


def test_unpack_writes_only_what_is_named(tmp_path: Path) -> None:
    archive, folder = tmp_path / "a.tar.gz", tmp_path / "folder"
    folder.mkdir()
    make_tar(archive, link("d", "", tarfile.DIRTYPE), plain("d/a", b"1"), plain("d/b", b"2"))
    unpack(archive, ["d/b"], folder)
    assert files_under(folder) == ["b"] and (folder / "b").read_bytes() == b"2"
    for missing in ("d/c", "d"):
        with pytest.raises(UserError, match="missing"):
            unpack(archive, [missing], folder)


# --- splits ---


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(70_000, (46_666, 11_666, 11_668)), (60_000, (40_000, 10_000, 10_000)), (1797, (1198, 299, 300))],
)
def test_paper_split(rows: int, sizes: tuple[int, int, int]) -> None:
    parts = split(pooled(rows), seed=3)
    assert (len(parts.train.truth), len(parts.val.truth), len(parts.test.truth)) == sizes
    index = torch.cat([parts.train.index, parts.val.index, parts.test.index])
    assert torch.equal(index.sort().values, torch.arange(rows))  # disjoint, and nothing is left out


def test_official_split() -> None:
    parts = split(pooled(70_000, official_test=10_000), kind="official")
    assert (len(parts.train.truth), len(parts.val.truth)) == (50_000, 10_000)
    assert torch.equal(parts.test.index, torch.arange(60_000, 70_000))
    assert torch.equal(torch.cat([parts.train.index, parts.val.index]).sort().values, torch.arange(60_000))
    with pytest.raises(UserError, match="digits has no official test"):
        split(load("digits"), kind="official")


def test_rows_stay_together() -> None:
    data = load("digits")
    parts = split(data, seed=1)
    for part in (parts.train, parts.val, parts.test):
        assert torch.equal(part.x, data.x[part.index]) and torch.equal(part.truth, data.truth[part.index])
        assert part.x.dtype == torch.uint8 and part.x.is_contiguous()


@pytest.mark.parametrize("kind", ["paper", "official"])
def test_seed_decides_the_split(kind: str) -> None:
    data = pooled(600, official_test=60)
    torch.manual_seed(1)
    first = split(data, kind, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = split(data, kind, seed=5), split(data, kind, seed=6)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched
    for name in ("train", "val", "test"):
        assert torch.equal(getattr(first, name).index, getattr(again, name).index)
    assert not torch.equal(first.train.index, other.train.index)


@pytest.mark.parametrize(("subset", "val"), [(1, 1), (3, 1), (100, 25), (400, 100)])
def test_subset(subset: int, val: int) -> None:
    whole, part = split(pooled(600)), split(pooled(600), subset=subset)
    assert torch.equal(part.train.index, whole.train.index[:subset])
    assert torch.equal(part.val.index, whole.val.index[:val])
    assert torch.equal(part.test.index, whole.test.index)


@pytest.mark.parametrize("subset", [0, -1, 401])
def test_subset_out_of_range(subset: int) -> None:
    with pytest.raises(UserError, match="1 to 400"):
        split(pooled(600), subset=subset)


# --- the real files ---


@pytest.mark.skipif(
    not (FMNIST.installed and FMNIST.installed.is_dir()),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_real_fmnist() -> None:
    data = load("fmnist", FMNIST.installed)
    assert data.x.shape == (70_000, 1, 28, 28) and data.official_test == 10_000
    assert data.truth[:60_000].bincount().tolist() == [6000] * 10
    assert data.truth[60_000:].bincount().tolist() == [1000] * 10
    assert data.classes[int(data.truth[0])] == "Ankle boot"
    assert data.x[:60_000].float().mean().item() / 255 == pytest.approx(0.2860, abs=1e-4)  # the published mean


@pytest.mark.parametrize(("name", "source"), [("cifar10", CIFAR10), ("cifar100", CIFAR100)])
def test_real_cifar(name: str, source: Source) -> None:
    if not REAL or not (Path(REAL) / source.folders[0]).is_dir():
        pytest.skip(f"URRL_DATA names no folder with {source.folders[0]}")
    data = load(name, REAL)
    per_class = 60_000 // len(data.classes)
    assert data.x.shape == (60_000, 3, 32, 32) and data.official_test == 10_000
    assert data.truth[:50_000].bincount().tolist() == [per_class * 5 // 6] * len(data.classes)
    assert data.truth[50_000:].bincount().tolist() == [per_class // 6] * len(data.classes)
    # The first training images, as every tutorial shows them.
    first = {
        "cifar10": ["frog", "truck", "truck", "deer"],
        "cifar100": ["cattle", "dinosaur", "apple", "boy"],
    }
    assert [data.classes[label] for label in data.truth[:4].tolist()] == first[name]
