"""CR-DPLL: the complement loss, and all views pulled to one label distribution (Wu et al., ICML 2022).

L = -sum over j not in S of log(1 - f_j) + w(t) sum over views of KL(l || f_view), with w(t) growing from zero and l the
renormalised geometric mean of all views on S, which is what Method.refine keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.functional import complement_nll, kl_to
from urrl.methods.base import Batch, Method, Step
from urrl.nets import Network, Out


@dataclass(frozen=True)
class CRDPLLConfig:
    w_cr: float = option(1.0, "weight of the consistency at its full height", 0)
    # NOTE: the paper counts epochs; 100 of the 200 that its code runs.
    ramp: float = option(0.5, "share of the run in which that weight grows from zero", 0, 1)


class CRDPLL(Method):
    Config = CRDPLLConfig
    views = ("weak", "strong", "strong2")
    config: CRDPLLConfig
    grown: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: CRDPLLConfig):
        super().__init__(net, sets, config)
        self.register_buffer("grown", torch.zeros(()))

    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        ramp = self.epochs_in(self.config.ramp)
        self.grown.fill_(min(1.0, epoch / ramp) if ramp else 1.0)
        return {}

    def loss(self, batch: Batch) -> Step:
        S, l = self.S[batch.index], self.l[batch.index]
        outs = self.forward_views(batch)
        terms = {
            "sup": complement_nll(outs["weak"].logits, S).mean(),
            "cr": torch.stack([kl_to(out.logits, l).mean() for out in outs.values()]).sum(),
        }
        return Step(terms["sup"] + self.grown * self.config.w_cr * terms["cr"], terms, outs)
