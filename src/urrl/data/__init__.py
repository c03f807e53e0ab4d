"""Datasets by name, and their seeded splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from urrl.data.readers import Dataset, birdsong, cifar10, cifar10n, cifar100, digits, fmnist, known, lost, msrcv2
from urrl.errors import UserError
from urrl.seeding import generator

__all__ = ["DATASETS", "Dataset", "Part", "Splits", "hold_out", "load", "part", "split"]

DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "digits": digits,
    "fmnist": fmnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar10n": cifar10n,
    "lost": lost,
    "msrcv2": msrcv2,
    "birdsong": birdsong,
}
FOLDS = tuple(f"fold:{k}" for k in range(10))


def load(name: str, data_dir: Path | str | None = None) -> Dataset:
    """A dataset by name; `data_dir` is where to look for its files first."""
    if name not in DATASETS:
        raise UserError(f"unknown dataset {name!r}; known: {', '.join(DATASETS)}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise UserError(f"the data folder {data_dir} does not exist")
    return DATASETS[name](None if data_dir is None else Path(data_dir))


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a dataset."""

    x: Any  # a tensor, or images that are Streamed: (n, ch, H, W) uint8, contiguous, or (n, d) float32
    y: Tensor | None  # (n,) int64; None: nobody knows
    index: Tensor  # (n,) int64, the row in the pooled set
    S: Tensor | None = None  # (n, C) bool: candidate sets that came with the data

    def __len__(self) -> int:
        return len(self.x)

    @property
    def truth(self) -> Tensor:
        return known(self.y)


@dataclass(frozen=True, eq=False)
class Splits:
    train: Part
    val: Part  # may have no rows, as the test part may
    test: Part


def default_split(dataset: Dataset) -> str:
    """The paper's, unless the candidate sets of the data leave no choice."""
    return "official" if dataset.S is not None and dataset.official_test else "paper"


def split(dataset: Dataset, kind: str = "paper", seed: int = 0, subset: int | None = None) -> Splits:
    """Split into train, val and test; the same seed gives the same split.

    "paper":    train and test pooled, shuffled, 4:1:1 (70,000 -> 46,666/11,666/11,668, the paper's sizes).
    "official": the official test part; the rest shuffled, a sixth of it for validation.
    "fold:K":   fold K of ten is the test part, K = 0 ... 9; all others train, and the last epoch counts.
    subset:     keep the first N training rows and N // 4 validation rows, for quick runs; test stays whole.
    """
    rows = len(dataset.x)
    rng = generator(seed, "split")
    if kind == "paper":
        order = torch.randperm(rows, generator=rng)
        train, val, test = order.tensor_split((rows * 4 // 6, rows * 4 // 6 + rows // 6))
    elif kind == "official":
        if not dataset.official_test:
            raise UserError(f"{dataset.name} has no official test part: use the split 'paper'")
        rest = rows - dataset.official_test
        train, val = torch.randperm(rest, generator=rng).tensor_split((rest - rest // 6,))
        test = torch.arange(rest, rows)
    elif kind in FOLDS:
        folds = list(torch.randperm(rows, generator=rng).tensor_split(len(FOLDS)))
        test = folds.pop(FOLDS.index(kind))
        train, val = torch.cat(folds), test[:0]
    else:
        raise UserError(f"unknown split {kind!r}; known: paper, official, {FOLDS[0]} to {FOLDS[-1]}")
    if dataset.S is not None and dataset.official_test and kind != "official":
        raise UserError(f"{dataset.name} has candidate sets for its training part alone: use the split 'official'")

    if subset is not None:
        if not 1 <= subset <= len(train):
            raise UserError(f"subset must be from 1 to {len(train)} (the training rows), not {subset}")
        train, val = train[:subset], val[: max(1, subset // 4)]
    return Splits(*(part(dataset, index) for index in (train, val, test)))


def hold_out(dataset: Dataset, share: float, seed: int = 0) -> Splits:
    """That share of the rows, drawn at random, for validation, but at least two for training; no test part."""
    order = torch.randperm(len(dataset.x), generator=generator(seed, "split"))
    held = min(round(share * len(order)), len(order) - 2) if share else 0
    return Splits(part(dataset, order[held:]), part(dataset, order[:held]), part(dataset, order[:0]))


def part(dataset: Dataset, index: Tensor) -> Part:
    """Those rows."""
    y, S = (None if column is None else column[index] for column in (dataset.y, dataset.S))
    return Part(dataset.x[index], y, index, S)
