"""IRNet: PiCO that adds to S a label that beats all candidates in two views alike (Lian et al., TPAMI 2025).

p = softmax(q . z) scores the classes. After the start, where max outside S of p exceeds max over S of p by a threshold,
in two weak views and for the same class, that class enters S for ever, and l with its p, renormalised. No noise rate is
known: one threshold serves all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.methods.base import Batch, Step
from urrl.methods.pico import PiCO, PiCOConfig
from urrl.nets import Network


@dataclass(frozen=True)
class IRNetConfig(PiCOConfig):
    # NOTE: the paper starts where the accuracy on the test set no longer climbs, after 100 of 1000 epochs or more.
    start: float = option(0.2, "share of the run in which S is left as it is", 0, 1)
    # NOTE: the paper picks it for each noise rate, between 0.008 and 0.02 for 10 classes and 0.002 for 100.
    threshold: float = option(0.1, "lead that a label needs over all candidates, in units of 1 / C", 0)


class IRNet(PiCO):
    Config = IRNetConfig
    views = ("weak", "strong", "weak2")
    config: IRNetConfig

    def __init__(self, net: Network, sets: CandidateSets, config: IRNetConfig):
        super().__init__(net, sets, config)
        self.keep_additions()

    def loss(self, batch: Batch) -> Step:
        step = super().loss(batch)
        if self.after(self.config.start):
            with torch.no_grad():
                step.outs["weak2"] = self.forward_view(batch.index, batch.views["weak2"])
        return step

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        views = [step.outs[view].q for view in ("weak", "weak2") if view in step.outs]
        scores = [(q @ self.z.T).softmax(1) for q in views]
        super().refine(batch, step)
        if not self.after(self.config.start):
            return
        lead = self.config.threshold / self.S.shape[1]
        enters, label, p = outsiders(scores[0], scores[1], self.S[batch.index], lead)
        self.enter(batch.index[enters], label, p, int(self.epoch))


def outsiders(p: Tensor, p2: Tensor, S: Tensor, lead: float) -> tuple[Tensor, Tensor, Tensor]:
    """(enters (B,) bool, and of those that do: label, p): a class outside S leads all on S, in both views the same."""
    outside, label = p.masked_fill(S, -1).max(1)
    outside2, label2 = p2.masked_fill(S, -1).max(1)
    inside, inside2 = (scores.masked_fill(~S, -1).amax(1) for scores in (p, p2))
    enters = (outside > inside + lead) & (outside2 > inside2 + lead) & (label == label2)
    return enters, label[enters], outside[enters]
