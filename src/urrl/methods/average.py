"""The lower bound: train on the candidate sets as they are, every candidate alike."""

from __future__ import annotations

from urrl.functional import soft_cross_entropy, uniform_on
from urrl.methods.base import Batch, Method, Step


class Average(Method):
    bound = "lower"

    def loss(self, batch: Batch) -> Step:
        outs = self.forward_views(batch.views)
        loss = soft_cross_entropy(outs["weak"].logits, uniform_on(self.S[batch.index])).mean()
        return Step(loss, {"average": loss}, outs)
