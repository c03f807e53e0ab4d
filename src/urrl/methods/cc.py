"""CC: the classifier-consistent loss, -log of the summed probability of the candidates (Feng et al., NeurIPS 2020).

L = -log sum over j in S of f_j. Nothing is weighted and nothing remembered: l is kept for the record alone.
"""

from __future__ import annotations

from urrl.likelihood import set_nll
from urrl.methods.base import Batch, Method, Step, mean_over_views


class CC(Method):
    views = ("weak", "strong")

    def loss(self, batch: Batch) -> Step:
        S = self.S[batch.index]
        outs = self.forward_views(batch)
        loss = mean_over_views(outs, lambda logits: set_nll(logits, S, mu=0.0))
        return Step(loss, {"cc": loss}, outs)
