"""PRODEN: cross-entropy weighted by the network's own last prediction on S (Lv et al., ICML 2020).

L = -sum over j in S of l_j log f_j; after the step l_j = f_j / sum over k in S of f_k, from that step's outputs.
It begins as the average over the candidates and ends, as l sharpens, with one label identified.
"""

from __future__ import annotations

from urrl.functional import soft_cross_entropy
from urrl.methods.base import Batch, Method, Step, mean_over_views


class PRODEN(Method):
    # NOTE: the paper has one view. Here the views of an item share its weights l, which follow both (Method.refine).
    views = ("weak", "strong")

    def loss(self, batch: Batch) -> Step:
        l = self.l[batch.index]
        outs = self.forward_views(batch)
        loss = mean_over_views(outs, lambda logits: soft_cross_entropy(logits, l))
        return Step(loss, {"proden": loss}, outs)
