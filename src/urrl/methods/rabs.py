"""RABS: the average of a bounded loss over the candidates, robust to wrong ones (Lv et al., TPAMI 2024).

L = 1/|S| sum over j in S of loss(f, j), every candidate alike for ever. Not the distance of f to the uniform vector on
S, which is another objective with another optimum: here f = e_j for any j in S is as good as f uniform on S (MAE), so
the items are free to agree on one. l is kept for the record alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from urrl.config import option
from urrl.functional import uniform_on
from urrl.methods.base import Batch, Method, Step, mean_over_views

LOG_ZERO = -4.0  # what the reverse cross-entropy of SCE takes for log 0 (Wang et al., ICCV 2019)


@dataclass(frozen=True)
class RABSConfig:
    loss: str = option("mae", "the loss that is averaged", choices=("mae", "gce", "sce", "mse"))
    gce_q: float = option(0.7, "GCE: between cross-entropy (near 0) and half of MAE (1)", 0.01, 1)
    sce_alpha: float = option(0.1, "SCE: weight of the cross-entropy, the one part that is not bounded", 0)
    sce_beta: float = option(1.0, "SCE: weight of the reverse cross-entropy", 0)


class RABS(Method):
    Config = RABSConfig
    views = ("weak", "strong")
    config: RABSConfig

    def loss(self, batch: Batch) -> Step:
        share = uniform_on(self.S[batch.index])
        outs = self.forward_views(batch)
        loss = mean_over_views(outs, lambda logits: (share * candidate_losses(logits, self.config)).sum(1))
        return Step(loss, {self.config.loss: loss}, outs)


def candidate_losses(logits: Tensor, c: RABSConfig) -> Tensor:
    """(B, C): the loss of f for each class as the label, e_j its one-hot vector."""
    logf = F.log_softmax(logits.float(), 1)
    f = logf.exp()
    if c.loss == "mae":
        return 2 - 2 * f  # |f - e_j|_1
    if c.loss == "mse":
        return 1 - 2 * f + f.square().sum(1, keepdim=True)  # |f - e_j|^2
    if c.loss == "gce":
        return -(c.gce_q * logf).expm1() / c.gce_q  # (1 - f_j^q) / q
    return -c.sce_alpha * logf - c.sce_beta * LOG_ZERO * (1 - f)
