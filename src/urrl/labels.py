"""Matrices with a row an item and a column a class, S and l above all, for any number of both.

Up to DENSE entries they are tensors. Beyond, SparseLabels keeps what lies on S alone: eight bytes a candidate, where
the dense S, l and epochs of addition take seven a class. Code that must serve both takes rows out (`S[rows]`, dense),
puts rows in (`l[rows] = ...`), goes through a whole matrix by `row_blocks` or through a process's part of it by
`own_blocks`, and sums neighbours by `weighted_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from urrl.distributed import share

DENSE = 2**28  # entries: l is 1 GB there
BLOCK = 2**25


def row_blocks(matrix: Tensor | Rows) -> Iterator[Tensor]:
    """The row numbers in blocks of at most BLOCK entries: one block, unless the matrix is large."""
    n, columns = matrix.shape
    yield from torch.arange(n, device=matrix.device).split(max(1, BLOCK // columns))


def own_blocks(matrix: Tensor | Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the rows that belong to this process, (row numbers, places among them), in blocks: as many on every process,
    of at most BLOCK entries on all of them together."""
    n, columns = matrix.shape
    rows = torch.arange(n, device=matrix.device)[share(n)]
    places = torch.arange(len(rows), device=matrix.device)
    count = -(-n * columns // BLOCK)
    yield from zip(rows.tensor_split(count), places.tensor_split(count))


def weighted_rows(matrix: Tensor | Rows, rows: Tensor, weights: Tensor) -> Tensor:
    """sum over k of weights[b, k] matrix[rows[b, k]]: (b, C)."""
    if isinstance(matrix, Rows):
        return matrix.weighted(rows, weights)
    return F.embedding_bag(rows, matrix.float(), per_sample_weights=weights, mode="sum")


class SparseLabels(nn.Module):
    """S, l and the epoch at which a label entered S, on S alone: a row's candidates lie between start[i] and
    start[i + 1], those that entered last at the end. The buffers grow, and checkpoint by themselves."""

    start: Tensor  # (n + 1,)
    column: Tensor  # (candidates,) each
    value: Tensor
    epoch: Tensor

    def __init__(self, masks: Iterable[Tensor]):
        """masks: S in blocks of rows, (b, C) bool, so that it need never be dense as a whole."""
        super().__init__()
        blocks, columns = [], []
        for S in masks:
            narrow = torch.int16 if S.shape[1] <= torch.iinfo(torch.int16).max else torch.int32
            blocks.append(S.sum(1))
            columns.append(S.nonzero()[:, 1].to(narrow))
        sizes = torch.cat(blocks)
        self.register_buffer("start", F.pad(sizes.cumsum(0), (1, 0)))
        self.register_buffer("column", torch.cat(columns))
        self.register_buffer("value", sizes.float().reciprocal().repeat_interleave(sizes))  # uniform on S
        self.register_buffer("epoch", torch.full_like(self.column, -1, dtype=torch.int16))
        self.shape = (len(self.start) - 1, S.shape[1])
        self.S, self.given = Rows(self, "S"), Rows(self, "given")
        self.l, self.added = Rows(self, "l"), Rows(self, "added")

    def with_evidence(self) -> Rows:
        """A fourth matrix on S, as l."""
        self.register_buffer("evidence", self.value.clone())
        return Rows(self, "evidence")

    def enter(self, rows: Tensor, labels: Tensor, share: Tensor, epoch: int) -> None:
        """One label outside S enters each of the rows, with that share of l before l is rescaled."""
        order = rows.argsort()
        rows, labels, share = rows[order], labels[order], share[order]
        more = torch.zeros_like(self.start)
        more[rows + 1] = 1
        self.start += more.cumsum(0)
        place = self.start[rows + 1] - 1  # at the end of its row
        old = torch.ones(len(self.column) + len(rows), dtype=torch.bool, device=place.device)
        old[place] = False
        entries = {"column": labels, "value": share, "evidence": share, "epoch": torch.full_like(labels, epoch)}
        for name, new in entries.items():
            if not hasattr(self, name):
                continue
            grown = getattr(self, name).new_empty(len(old)).masked_scatter_(old, getattr(self, name))
            grown[place] = new.to(grown.dtype)
            setattr(self, name, grown)
        for part in rows.split(max(1, BLOCK // self.shape[1])):
            l = self.l[part]
            self.l[part] = l / l.sum(1, keepdim=True)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._buffers.keys() - {"start"}:  # of another length where labels have entered
            setattr(self, name, torch.empty_like(state[prefix + name], device=self.start.device))
        super()._load_from_state_dict(state, prefix, *rest)


class Rows:
    """One matrix of a SparseLabels, as rows that come out dense and go in dense."""

    def __init__(self, of: SparseLabels, name: str):
        self.of, self.name = of, name

    @property
    def shape(self) -> tuple[int, int]:
        return self.of.shape

    @property
    def device(self) -> torch.device:
        return self.of.start.device

    def sum(self, dim: int) -> Tensor:
        """Over a row's columns, (n,): |S| of every item."""
        assert dim == 1
        row = torch.repeat_interleave(self.of.start.diff())
        return torch.zeros(self.shape[0], device=self.device).index_add_(0, row, self._entries().float())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        row, place = self._places(rows)
        entries = self._entries(place)
        dense = torch.full((len(rows), self.shape[1]), -1 if self.name == "added" else 0, dtype=entries.dtype,
                           device=self.device)  # fmt: skip
        dense[row, self.of.column[place].long()] = entries
        return dense

    def __setitem__(self, rows: Tensor, dense: Tensor) -> None:
        """What of it lies on S."""
        row, place = self._places(rows)
        self._buffer()[place] = dense[row, self.of.column[place].long()]

    def weighted(self, rows: Tensor, weights: Tensor) -> Tensor:
        b, k = rows.shape
        sums = torch.zeros(b * self.shape[1], device=self.device)
        row, place = self._places(rows.flatten())
        where = row.div(k, rounding_mode="floor") * self.shape[1] + self.of.column[place]
        sums.index_add_(0, where, self._entries(place) * weights.flatten()[row])
        return sums.view(b, self.shape[1])

    def _entries(self, place: Tensor | slice = slice(None)) -> Tensor:
        if self.name == "S":
            return torch.ones_like(self.of.column[place], dtype=torch.bool)
        if self.name == "given":
            return self.of.epoch[place] < 0
        return self._buffer()[place]

    def _buffer(self) -> Tensor:
        return getattr(self.of, {"l": "value", "added": "epoch"}.get(self.name, self.name))

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of all entries in these rows: (which of `rows`, place in the buffers)."""
        first, size = self.of.start[rows], self.of.start[rows + 1] - self.of.start[rows]
        row = torch.repeat_interleave(size)
        before = size.cumsum(0) - size
        return row, torch.arange(len(row), device=rows.device) - (before - first)[row]
