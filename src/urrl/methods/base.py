"""What every method is: a module whose buffers are all of its memory, with three hooks in the one loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from urrl import distributed, labels
from urrl.candidates import CandidateSets
from urrl.data.stream import Items
from urrl.functional import softmax_on, uniform_on
from urrl.nets import Network, Out


class Batch(NamedTuple):
    index: Tensor  # type: ignore[assignment]  # (B,) rows of the training part; a batch has no labels, ever
    views: dict[str, Tensor]  # augmented images, (B, ...) each; of several processes each has its share of the rows


class Step(NamedTuple):
    total: Tensor  # what is minimised
    terms: dict[str, Tensor]  # its parts, for people
    outs: dict[str, Out]  # of every view
    own: bool = False  # of several processes each has only what its own rows add: the sums of total and terms count


@dataclass(frozen=True)
class NoOptions:
    """For methods without hyperparameters."""


class Method(nn.Module):
    """Candidate sets S and label distribution l are buffers, as is whatever a subclass adds: they checkpoint
    by themselves. `l` sums to 1 and lives on S. Of very many items and classes they are kept sparse: see labels.py."""

    Config: ClassVar[type] = NoOptions
    views: tuple[str, ...] = ("weak",)
    bound: ClassVar[str | None] = None  # "upper" or "lower": not a method to use but a line to compare with
    total_epochs: int = 500  # of the run; the loop sets it, schedules are shares of it
    may_stop: bool = False  # before that, where validation does not get better; the loop sets it
    scouted: int = 0  # epochs of a first network, before that of the run begins; the loop sets it
    S: Any  # (n, C) bool, and
    l: Any  # (n, C): tensors or labels.Rows
    added: Any  # (n, C): the epoch at which a label entered S, or -1; of the methods that correct S

    def __init__(self, net: Network, sets: CandidateSets, config: Any):
        super().__init__()
        self.net = net
        self.config = config
        mask, self.kept = sets.mask, None
        if mask.numel() <= labels.DENSE:
            self.register_buffer("S", mask.clone())
            self.register_buffer("l", uniform_on(mask))
        else:
            self.kept = labels.SparseLabels(mask[rows] for rows in labels.row_blocks(mask))
            self.S, self.l = self.kept.S, self.kept.l

    def keep_additions(self) -> None:
        """For methods that correct S."""
        if self.kept is None:
            self.register_buffer("added", torch.full(self.S.shape, -1, dtype=torch.int16))
        else:
            self.added = self.kept.added

    def given(self, rows: Tensor) -> Tensor:
        """The candidate sets as they came."""
        return self.S[rows] & (self.added[rows] < 0)

    def enter(self, rows: Tensor, labels: Tensor, share: Tensor, epoch: int) -> None:
        """A label outside S enters each of these rows, with its share of l before l is rescaled."""
        if self.kept is not None:
            return self.kept.enter(rows, labels, share, epoch)
        self.S[rows, labels] = True
        self.added[rows, labels] = epoch
        self.l[rows, labels] = share
        self.l[rows] /= self.l[rows].sum(1, keepdim=True)

    def prepare(self, x: Items) -> None:
        """Before the first epoch: a look at the raw training items, in index order."""

    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        """Before an epoch; `infer()` gives the outputs for this process's share of the training items, un-augmented, in
        index order: for all of them, where it is alone; `infer(turn)` those for another of the looks that a prediction
        is the mean over. Returns figures for the epoch's record."""
        return {}

    def loss(self, batch: Batch) -> Step:
        raise NotImplementedError

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        """After a step: l from the step's own outputs, the geometric mean of the batch's views renormalised
        on S. sqrt(f_w f_s) over its sum on S is the softmax of the mean logits on S: normalisers cancel."""
        logits = torch.stack([step.outs[view].logits.detach().float() for view in batch.views]).mean(0)
        self.l[batch.index] = softmax_on(self.S[batch.index], logits)

    def forward_views(self, batch: Batch, net: Network | None = None) -> dict[str, Out]:
        """One forward for all views, by another network than the method's own if need be. Of several processes each
        sends its share through and gets the outputs of the whole batch."""
        out = (net or self.net)(torch.cat(list(batch.views.values())), len(batch.views))
        parts = [part for t in out for part in t.tensor_split(len(batch.views))]  # logits of every view, q of every ...
        parts = distributed.gather(parts, len(batch.index))
        return {view: Out(*parts[i :: len(batch.views)]) for i, view in enumerate(batch.views)}

    def forward_view(self, index: Tensor, view: Tensor, net: Network | None = None) -> Out:
        return self.forward_views(Batch(index, {"": view}), net)[""]

    def epochs_in(self, share: float) -> int:
        """That share of the run in whole epochs, rounded up: a short run keeps every phase of a long one."""
        return math.ceil(share * self.total_epochs - 1e-9)  # 0.07 * 100 is a little more than 7


def mean_over_views(outs: dict[str, Out], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """A loss that knows of one view, on several: each counts as an item. loss: logits (B, C) -> (B,)."""
    return torch.stack([loss(out.logits).mean() for out in outs.values()]).mean()
