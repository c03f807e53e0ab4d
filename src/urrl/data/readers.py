"""The data sets: each function checks and reads the official files into one tensor, and their own candidate sets where
they have some.

Adding a dataset: one function here, one line in `DATASETS`.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from urrl.data.augment import Features, Policy
from urrl.data.download import Source, find, locate
from urrl.errors import UserError
from urrl.files import UNREADABLE


@dataclass(frozen=True, eq=False)
class Dataset:
    """All items of a set, pooled: official training rows first, then official test rows."""

    name: str
    x: Any  # a tensor, or images that are Streamed: (N, ch, H, W) uint8 images or (N, d) float32 features
    y: Tensor | None  # (N,) int64, the true labels: only for making candidate sets and for evaluation; None: unknown
    classes: tuple[Any, ...]
    official_test: int  # how many of the last rows are the official test part; 0 = the set has none
    augment: str | Policy | Features  # the views: name of a policy, or the policy itself
    S: Tensor | None = None  # (N, C) bool: candidate sets that came with the data; an official test row names all

    @property
    def truth(self) -> Tensor:
        return known(self.y)


def known(y: Tensor | None) -> Tensor:
    """The true labels, where somebody knows them."""
    if y is None:
        raise UserError(
            "the true labels of this data are not known: it takes candidate sets, and a method to learn from them"
        )
    return y


FMNIST_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FMNIST = Source(
    files={
        "train-images-idx3-ubyte.gz": 60_000,
        "train-labels-idx1-ubyte.gz": 60_000,
        "t10k-images-idx3-ubyte.gz": 10_000,
        "t10k-labels-idx1-ubyte.gz": 10_000,
    },
    folders=("fashion-mnist", "FashionMNIST/raw"),
    # For downloads alone: Debian compresses the same bytes again, so its .gz files have other checksums.
    urls={
        f"{FMNIST_SITE}/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        f"{FMNIST_SITE}/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        f"{FMNIST_SITE}/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        f"{FMNIST_SITE}/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    installed=Path("/usr/share/datasets/fashion-mnist"),
    hint=" (on Debian: apt-get install dataset-fashion-mnist)",
)
CIFAR10 = Source(
    files={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)} | {"test_batch.bin": 10_000},
    folders=("cifar-10-batches-bin",),
    urls={"https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
)
CIFAR100 = Source(
    files={"train.bin": 50_000, "test.bin": 10_000},
    folders=("cifar-100-binary",),
    urls={"https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
)
CIFAR10N = Source(
    files={"CIFAR-10_human.pt": 50_000},
    folders=("cifar-n",),
    urls={
        "https://github.com/UCSC-REAL/cifar-10-100n/raw/main/data/CIFAR-10_human.pt": "96644db5574813cae939af5f7f2a0aec"
    },
)
CIFAR10N_NPZ = replace(CIFAR10N, files={"cifar10n.npz": 50_000}, folders=("cifar-n", "human"))  # the same arrays
ANNOTATORS = ("random_label1", "random_label2", "random_label3")


def _table_source(file: str, rows: int) -> Source:
    hint = " (the partial-label data sets of the PALM lab, http://palm.seu.edu.cn/zhangml/)"
    return Source({file: rows}, ("partial-label", "tabular"), urls={}, hint=hint)


LOST, MSRCV2, BIRDSONG = (
    _table_source("lost.mat", 1122), _table_source("MSRCv2.mat", 1758), _table_source("BirdSong.mat", 4998)
)  # fmt: skip

DIGITS_CLASSES = tuple("0123456789")
FMNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
    "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
    "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip


def digits(data_dir: Path | None = None) -> Dataset:
    """Handwritten digits, 8x8, inside scikit-learn: needs no file."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8)  # values 0..16 -> 0..255
    y = torch.from_numpy(bunch.target).long()
    return Dataset("digits", x.unsqueeze(1), y, DIGITS_CLASSES, official_test=0, augment="digits")


def fmnist(data_dir: Path | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 grey images of clothes, 28x28, 10 classes."""
    folder = locate(FMNIST, data_dir)
    images, labels = [], []
    for name, rows in FMNIST.files.items():
        if "images" in name:
            images.append(read_idx(folder / name, (rows, 28, 28)))
        else:
            labels.append(_labels(folder / name, read_idx(folder / name, (rows,)), len(FMNIST_CLASSES)))
    x = torch.cat(images).unsqueeze(1)
    return Dataset("fmnist", x, torch.cat(labels), FMNIST_CLASSES, FMNIST.test_rows, augment="fmnist")


def cifar10(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10: 60,000 colour images, 32x32, 10 classes."""
    return _cifar("cifar10", CIFAR10, data_dir, CIFAR10_CLASSES, labels=1)


def cifar100(data_dir: Path | None = None) -> Dataset:
    """CIFAR-100: 60,000 colour images, 32x32, 100 fine classes."""
    return _cifar("cifar100", CIFAR100, data_dir, CIFAR100_CLASSES, labels=2)


def cifar10n(data_dir: Path | None = None) -> Dataset:
    """CIFAR-10N: CIFAR-10 with the labels of three people per training image as its candidate sets."""
    images = cifar10(data_dir)
    rows = len(images.x) - images.official_test
    folder = find(CIFAR10N_NPZ, data_dir)
    path = (folder / "cifar10n.npz") if folder else locate(CIFAR10N, data_dir) / "CIFAR-10_human.pt"
    labels = _read_labels(path, rows, len(images.classes))
    if not torch.equal(labels.pop("clean_label"), images.truth[:rows]):
        raise UserError(f"{path}: its labels are in another order than the images of CIFAR-10")
    S = torch.zeros(len(images.x), len(images.classes), dtype=torch.bool)
    S[rows:] = True
    for given in labels.values():
        S[torch.arange(len(given)), given] = True
    return replace(images, name="cifar10n", S=S)


def _read_labels(path: Path, rows: int, classes: int) -> dict[str, Tensor]:
    """The true labels and those of the three annotators, (rows,) each, from the published .pt or the same as .npz."""
    rebuild = np.empty(0).__reduce__()[0]  # how numpy pickles an array; the file names it by its old module
    old = (rebuild, "numpy.core.multiarray._reconstruct")
    harmless: list[Any] = [rebuild, old, np.ndarray, np.dtype, np.dtypes.Int64DType]
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                held: Mapping[str, Any] = dict(file)
        else:
            with torch.serialization.safe_globals(harmless):
                held = torch.load(path, weights_only=True)
        columns = {name: torch.from_numpy(np.asarray(held[name]).astype(np.int64))
                   for name in ("clean_label", *ANNOTATORS)}  # fmt: skip
    except UNREADABLE as error:
        raise UserError(f"cannot read {path}: it is not the file that was published") from error
    for name, column in columns.items():
        if column.shape != (rows,) or int(column.min()) < 0:
            raise UserError(f"{path}: {name} should be {rows} labels")
        _labels(path, column, classes)
    return columns


def lost(data_dir: Path | None = None) -> Dataset:
    """Lost: 1,122 faces of a television series as 108 features; candidates are the 16 names in the script."""
    return _table("lost", LOST, data_dir)


def msrcv2(data_dir: Path | None = None) -> Dataset:
    """MSRCv2: 1,758 image segments as 48 features; candidates are the objects in the image, of 23 classes."""
    return _table("msrcv2", MSRCV2, data_dir)


def birdsong(data_dir: Path | None = None) -> Dataset:
    """BirdSong: 4,998 syllables as 38 features; candidates are the birds in the recording, of 13 species."""
    return _table("birdsong", BIRDSONG, data_dir)


def _table(name: str, source: Source, data_dir: Path | None) -> Dataset:
    from urrl.data.own import own_policy  # late: it needs this module

    ((file, rows),) = source.files.items()
    path = locate(source, data_dir) / file
    x, y, S = read_table(path, rows)
    classes = tuple(str(c) for c in range(S.shape[1]))  # the files hold no names
    return Dataset(name, x, y, classes, official_test=0, augment=own_policy(x), S=S)


def read_table(path: Path, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Read a partial-label .mat file: data (n, d), target and partial_target (C, n) of 0 and 1, maybe sparse."""
    from scipy.io import loadmat
    from scipy.sparse import issparse

    try:
        held = loadmat(path)
        data, target, partial = (held[key] for key in ("data", "target", "partial_target"))
    except UNREADABLE as error:
        raise UserError(f"cannot read {path}: {error}") from error
    truth, given = ((np.asarray(t.todense() if issparse(t) else t) != 0).T for t in (target, partial))
    if data.ndim != 2 or len(data) != rows or truth.shape != given.shape or len(given) != rows:
        raise UserError(f"{path}: should hold {rows} rows; data is {data.shape}, target {truth.shape[::-1]}, "
                        f"partial_target {given.shape[::-1]}")  # fmt: skip
    if not np.isfinite(data).all() or (truth.sum(1) != 1).any() or not given.any(1).all():
        raise UserError(f"{path}: damaged: a feature is no number, or a row has no candidate or not one true label")
    return torch.from_numpy(data).float(), torch.from_numpy(truth.argmax(1)), torch.from_numpy(given)


def _cifar(name: str, source: Source, data_dir: Path | None, classes: tuple[str, ...], labels: int) -> Dataset:
    folder = locate(source, data_dir)
    parts = [read_cifar(folder / file, rows, len(classes), labels) for file, rows in source.files.items()]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    return Dataset(name, x, y, classes, source.test_rows, augment="cifar")


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read an idx.gz file of bytes: magic 0, 0, 8, dimensions; each size as big-endian int32; the values."""
    header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
    size = math.prod(shape)
    try:
        with gzip.open(path) as file:
            # One byte more than expected: shows a file that is too long, and reaches gzip's own checksum.
            head, values = file.read(len(header)), file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if head[:4] != header[:4]:
        raise UserError(f"{path}: not an idx file of bytes in {len(shape)} dimension(s) (wrong magic number)")
    if head != header or len(values) != size:
        raise UserError(f"{path}: does not hold the {' x '.join(map(str, shape))} values that it should")
    return _bytes(values).view(shape)


def read_cifar(path: Path, rows: int, classes: int, labels: int) -> tuple[Tensor, Tensor]:
    """Read a CIFAR binary file. A row: `labels` bytes, the last one is the (fine) label; then 3x32x32."""
    width = labels + 3 * 32 * 32
    try:
        with open(path, "rb") as file:
            data = file.read(rows * width + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if len(data) != rows * width:
        raise UserError(f"{path}: wrong size, it should hold {rows} rows of {width} bytes")
    table = _bytes(data).view(rows, width)
    return table[:, labels:].reshape(rows, 3, 32, 32), _labels(path, table[:, labels - 1], classes)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: torch wants memory it may write to


def _labels(path: Path, y: Tensor, classes: int) -> Tensor:
    if int(y.max()) >= classes:
        raise UserError(f"{path}: label {int(y.max())} is out of range, there are {classes} classes")
    return y.long()
