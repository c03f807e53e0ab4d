"""RC: the risk-consistent loss, candidates weighted by their posterior p(y | x) / p(S | x) (Feng et al., NeurIPS 2020).

The posterior is the network's own, taken after each step by the network that the step has made. The loss is PRODEN's;
RC differs in how fresh the weights are and in what they mean: importance weights that make the risk unbiased where
candidate sets are drawn uniformly.
"""

from __future__ import annotations

import torch

from urrl.functional import soft_cross_entropy
from urrl.methods.base import Batch, Method, Step, mean_over_views


class RC(Method):
    views = ("weak", "strong")

    def loss(self, batch: Batch) -> Step:
        l = self.l[batch.index]
        outs = self.forward_views(batch)
        # NOTE: the paper's risk has a factor 1/2, which its code drops.
        loss = mean_over_views(outs, lambda logits: soft_cross_entropy(logits, l))
        return Step(loss, {"rc": loss}, outs)

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        """l from one more forward, of the updated network."""
        super().refine(batch, step._replace(outs=self.forward_views(batch)))
