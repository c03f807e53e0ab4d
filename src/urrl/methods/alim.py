"""ALIM: PiCO with labels outside S at a discount lambda, set by an estimate of the noise (Xu et al., NeurIPS 2023).

Wherever PiCO multiplies a score by S, ALIM multiplies it by S + lambda (1 - S): lambda = 0 believes the sets,
lambda = 1 the network. An item crosses over where max over S of p < lambda max outside S of p, so lambda is the
quantile of that ratio, over all items, at the share of items whose true label is missing. L = L_PiCO + w_mix L_mixup.

The target w can have mass outside S. l, the common record, is w restricted to S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.functional import mixup, renormalise_on, soft_cross_entropy, uniform_on
from urrl.methods.base import Batch, Step
from urrl.methods.pico import PiCO, PiCOConfig
from urrl.nets import Network, Out


@dataclass(frozen=True)
class ALIMConfig(PiCOConfig):
    # NOTE: the paper counts epochs; its code waits 80 of 1000.
    start: float = option(0.08, "share of the run in which only candidates count, lambda = 0", 0, 1)
    w_mix: float = option(1.0, "weight of the mixup loss", 0)
    alpha: float = option(4.0, "mixup draws lambda from Beta(alpha, alpha)", 0.05)


class ALIM(PiCO):
    Config = ALIMConfig
    config: ALIMConfig
    w: Tensor
    log_ratio: Tensor
    sureness: Tensor
    log_lambda: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: ALIMConfig):
        super().__init__(net, sets, config)
        n = len(sets.mask)
        self.register_buffer("w", uniform_on(sets.mask))  # dense at any size
        self.register_buffer("log_ratio", torch.zeros(n))  # log of max on S / max outside, at the item's last step
        self.register_buffer("sureness", torch.zeros(n))  # the largest score there
        self.register_buffer("log_lambda", torch.tensor(-torch.inf))

    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        super().begin_epoch(epoch, infer)
        if not self.after(self.config.start):
            return {}
        noise = missing_rate(self.log_ratio, self.sureness)
        if noise > 0:
            self.log_lambda.copy_(quantile(self.log_ratio, noise).clamp_max(0))
        else:
            self.log_lambda.fill_(-torch.inf)  # every set holds its label
        return {"noise_estimate": noise, "lambda": math.exp(self.log_lambda)}

    def loss(self, batch: Batch) -> Step:
        step = super().loss(batch)
        weak = batch.views["weak"]
        mixed, target = mixup(weak, self.target(batch.index, step.outs["weak"]), self.config.alpha)
        mix = soft_cross_entropy(self.forward_view(batch.index, mixed).logits, target).mean()
        return Step(step.total + self.config.w_mix * mix, {**step.terms, "mix": mix}, step.outs)

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        S, score = self.S[batch.index], step.outs["weak"].q @ self.z.T / self.config.tau
        inside, outside = (score.masked_fill(m, -torch.inf).amax(1) for m in (~S, S))
        self.log_ratio[batch.index] = inside - outside
        self.sureness[batch.index] = score.softmax(1).amax(1)
        super().refine(batch, step)

    def log_trust(self, index: Tensor) -> Tensor:
        return torch.where(self.S[index], 0.0, self.log_lambda)

    def recall(self, index: Tensor) -> Tensor:
        return self.w[index]

    def remember(self, index: Tensor, target: Tensor) -> None:
        self.w[index] = target
        self.l[index] = renormalise_on(self.S[index], target)


def missing_rate(log_ratio: Tensor, sureness: Tensor) -> float:
    """How many sets lack their true label, of the items whose label is known best.

    NOTE: the paper takes the rate as given. Over all items the share that points outside S also counts the network's
    own mistakes (and would make lambda 1); the surer half has few, and misses its labels at the same rate.
    """
    surest = sureness.argsort(descending=True, stable=True)[: max(1, len(sureness) // 2)]
    return float((log_ratio[surest] < 0).double().mean())


def quantile(values: Tensor, share: float) -> Tensor:
    """The smallest value that at least that share of the values lie below, or the largest."""
    return values.sort().values[min(int(share * len(values)), len(values) - 1)]
