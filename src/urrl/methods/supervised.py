"""The upper bound: cross-entropy on clean labels, which come as candidate sets of one label each."""

from __future__ import annotations

from urrl.functional import soft_cross_entropy
from urrl.methods.base import Batch, Method, Step


class Supervised(Method):
    bound = "upper"

    def loss(self, batch: Batch) -> Step:
        outs = self.forward_views(batch.views)
        loss = soft_cross_entropy(outs["weak"].logits, self.S[batch.index].float()).mean()
        return Step(loss, {"cross_entropy": loss}, outs)
