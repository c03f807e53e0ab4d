"""PiCO+: PiCO that trusts the items near their prototype and guesses labels for the others (Wang et al., TPAMI 2024).

At each epoch the share `pure` of the items, the nearest to the prototype of their surest candidate, is reliable. Only
those make prototypes, attract one another by label and are fitted to l. The others may be of any class, attract their
nearest neighbours and are fitted to a guess, softmax(q . z / tau). Mixup trains on both.
L = L_mix + w_cls L_cls(reliable) + w_other L_cls(others) + w_cont L_cont(reliable) + w_other L_knn(others)
    + w_other L_cont(all, by label)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.functional import mixup, soft_cross_entropy
from urrl.methods.base import Batch, Step
from urrl.methods.pico import PiCO, PiCOConfig, label_mean, log_everyone, moved
from urrl.nets import Network, Out


@dataclass(frozen=True)
class PiCOPlusConfig(PiCOConfig):
    # NOTE: the paper counts epochs; its code waits 5 of 800 for the reliable items, 100 of 800 for the neighbours.
    warm: float = option(0.00625, "share of the run in which l rests and each item attracts its own key alone", 0, 1)
    select: float = option(0.00625, "share of the run in which all items are reliable: plain PiCO", 0, 1)
    knn: float = option(0.125, "share of the run after which unreliable items attract their neighbours", 0, 1)
    # NOTE: the paper chooses it by the noise rate, which nobody knows; 0.6 is its code's.
    pure: float = option(0.6, "share of the items that are taken for reliable", 0, 1)
    neighbours: int = option(16, "how many an unreliable item attracts", 1)
    w_cls: float = option(2.0, "weight of the loss of reliable items", 0)
    w_other: float = option(0.1, "weight of the losses of unreliable items", 0)
    alpha: float = option(4.0, "mixup draws lambda from Beta(alpha, alpha)", 0.05)


class PiCOPlus(PiCO):
    Config = PiCOPlusConfig
    config: PiCOPlusConfig
    distance: Tensor
    reliable: Tensor
    queue_reliable: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: PiCOPlusConfig):
        super().__init__(net, sets, config)
        n = len(sets.mask)
        self.register_buffer("distance", torch.zeros(n))  # to the prototype of the surest candidate, at the last step
        self.register_buffer("reliable", torch.ones(n, dtype=torch.bool))
        self.register_buffer("queue_reliable", torch.zeros(len(self.queue), dtype=torch.bool))

    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        super().begin_epoch(epoch, infer)
        if self.after(self.config.select):
            near = self.distance.argsort(stable=True)[: int(self.config.pure * len(self.distance))]
            self.reliable.fill_(False)[near] = True
        return {}

    def loss(self, batch: Batch) -> Step:
        c = self.config
        if not self.after(c.select):
            return super().loss(batch)
        weak, reliable = batch.views["weak"], self.reliable[batch.index]
        out = self.forward_view(batch.index, weak)
        with torch.no_grad():
            key = self.forward_view(batch.index, batch.views["strong"], self.key)
            guess = (out.q @ self.z.T / c.tau).softmax(1)
            target = torch.where(reliable[:, None], self.target(batch.index, out), guess)
        mixed, mixed_target = mixup(weak, target, c.alpha)
        fit = soft_cross_entropy(out.logits, target)  # (B,)

        label, C = self.label(batch.index, out), len(self.z)
        rest, rest_label = self.rest(key, label)
        trusted = torch.cat([reliable, self.queue_reliable])
        everyone = log_everyone(out.q, rest, c.tau)  # (B,)
        by_label = label_mean(out.q, label, rest, rest_label, C)
        near = label_mean(out.q[reliable], label[reliable], rest[trusted], rest_label[trusted], C)
        far = neighbour_mean(out.q, rest, ~reliable, c.neighbours if self.after(c.knn) else 0)
        terms = {
            "mix": soft_cross_entropy(self.forward_view(batch.index, mixed).logits, mixed_target).mean(),
            "cls": mean_over(reliable, fit),
            "cls_other": mean_over(~reliable, fit),
            # NOTE: the paper's code weighs all items alike, with 1, until the neighbours come in.
            "cont": c.w_cont * (everyone[reliable] - near / c.tau).sum() / len(label)
            + c.w_other * (everyone[~reliable] - far / c.tau).sum() / len(label),
            "cont_all": (everyone - by_label / c.tau).mean(),
        }
        total = terms["mix"] + c.w_cls * terms["cls"] + terms["cont"]
        total = total + c.w_other * (terms["cls_other"] + terms["cont_all"])
        return Step(total, terms, {"weak": out, "strong": key})

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        out, key, reliable = step.outs["weak"], step.outs["strong"], self.reliable[batch.index]
        surest = super().label(batch.index, out)
        self.distance[batch.index] = 1 - (out.q * self.z[surest]).sum(1)
        label = self.label(batch.index, out)
        self.remember(batch.index, self.target(batch.index, out))
        self.z.copy_(moved(self.z, out.q[reliable], label[reliable], self.config.z_decay))
        place = self.enqueue(key.q, label)
        self.queue_reliable[place] = reliable[-len(place) :]
        self.follow()

    @torch.no_grad()
    def label(self, index: Tensor, out: Out) -> Tensor:
        """(B,) the surest candidate of a reliable item, the surest class of any other."""
        return torch.where(self.reliable[index], super().label(index, out), out.logits.argmax(1))


def neighbour_mean(q: Tensor, rest: Tensor, chosen: Tensor, k: int) -> Tensor:
    """(b,): of the chosen queries, the mean similarity to the k nearest of the other queries and the rest, and to the
    query's own key if that is not among them. The rest begins with the keys."""
    row = chosen.nonzero().squeeze(1)
    key = (len(q) + row)[:, None]  # its place among the others
    others = torch.cat([q, rest])
    with torch.no_grad():
        similarity = q[row] @ others.T
        similarity[torch.arange(len(row), device=row.device), row] = -torch.inf
        place = similarity.topk(min(k, len(others) - 1), sorted=False).indices  # (b, k)
    own = ~(place == key).any(1, keepdim=True)  # whether it is one more
    positive = (q[row, None] * others[torch.cat([place, key], 1)]).sum(2)  # (b, k + 1)
    counts = torch.cat([torch.ones_like(place, dtype=torch.bool), own], 1)
    return (positive * counts).sum(1) / counts.sum(1)


def mean_over(chosen: Tensor, loss: Tensor) -> Tensor:
    """The mean of the chosen items' losses; zero where there are none."""
    return (loss * chosen).sum() / chosen.sum().clamp_min(1)
