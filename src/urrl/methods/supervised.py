"""The upper bound: cross-entropy on clean labels, which come as candidate sets of one label each."""

from __future__ import annotations

from urrl.functional import soft_cross_entropy
from urrl.methods.base import Batch, Method, Step, mean_over_views


class Supervised(Method):
    bound = "upper"
    views = ("weak", "strong")

    def loss(self, batch: Batch) -> Step:
        target = self.S[batch.index].float()
        outs = self.forward_views(batch)
        loss = mean_over_views(outs, lambda logits: soft_cross_entropy(logits, target))
        return Step(loss, {"cross_entropy": loss}, outs)
