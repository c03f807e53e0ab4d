"""The lower bound: train on the candidate sets as they are, every candidate alike."""

from __future__ import annotations

from urrl.functional import soft_cross_entropy, uniform_on
from urrl.methods.base import Batch, Method, Step, mean_over_views


class Average(Method):
    bound = "lower"
    views = ("weak", "strong")

    def loss(self, batch: Batch) -> Step:
        target = uniform_on(self.S[batch.index])
        outs = self.forward_views(batch)
        loss = mean_over_views(outs, lambda logits: soft_cross_entropy(logits, target))
        return Step(loss, {"average": loss}, outs)
