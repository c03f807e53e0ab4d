"""PiCO: contrast among items by their predicted label; prototypes choose the target (Wang et al., ICLR 2022).

q (B, d) embedding of the weak view by the network, k (B, d) of the strong view by a slow copy of it, the key encoder;
a queue holds the keys of the last steps. Items whose surest candidate is the same attract one another. z (C, d) are
moving averages of q by that label; the target l moves to the candidate whose prototype is nearest.
L = -sum of l log f + w_cont L_cont.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.functional import soft_cross_entropy
from urrl.methods.base import Batch, Method, Step
from urrl.nets import Network, Out


@dataclass(frozen=True)
class PiCOConfig:
    w_cont: float = option(0.5, "weight of the contrastive loss", 0)
    tau: float = option(0.07, "temperature of the contrastive loss", 0.02)
    queue: int = option(8192, "keys remembered for contrast, at most as many as there are items", 1)
    key_decay: float = option(0.999, "decay of the key encoder's averaged weights", 0, 1)
    z_decay: float = option(0.99, "decay of the prototypes, for each item", 0, 1)
    phi_first: float = option(0.95, "decay of the target l at the start of the run ...", 0, 1)
    phi_last: float = option(0.8, "... and at its end, along a line", 0, 1)
    # NOTE: the paper counts epochs; its code waits 1 of 800. A short run waits one too.
    warm: float = option(0.00125, "share of the run in which l rests and each item attracts its own key alone", 0, 1)


class PiCO(Method):
    Config = PiCOConfig
    views: tuple[str, ...] = ("weak", "strong")
    config: PiCOConfig
    z: Tensor
    queue: Tensor
    queue_label: Tensor
    pointer: Tensor
    steps: Tensor
    epoch: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: PiCOConfig):
        super().__init__(net, sets, config)
        size = min(config.queue, len(sets.mask))
        self.key = copy.deepcopy(net).requires_grad_(False)
        self.register_buffer("z", torch.zeros(sets.n_classes, net.embed_dim))
        # Until it is full the queue holds random directions of no class: negatives for everyone.
        self.register_buffer("queue", F.normalize(torch.randn(size, net.embed_dim), dim=1))
        self.register_buffer("queue_label", torch.full((size,), -1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))  # the oldest key's place
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("epoch", torch.zeros((), dtype=torch.long))

    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        self.epoch.fill_(epoch)
        return {}

    def after(self, share: float) -> bool:
        """Whether that share of the run is over."""
        return int(self.epoch) >= self.epochs_in(share)

    def loss(self, batch: Batch) -> Step:
        out = self.forward_view(batch.index, batch.views["weak"])
        with torch.no_grad():
            key = self.forward_view(batch.index, batch.views["strong"], self.key)
        l = self.target(batch.index, out)
        label = self.label(batch.index, out)
        rest, rest_label = self.rest(key, label)
        if self.after(self.config.warm):
            cont = attract_label(out.q, label, rest, rest_label, len(self.z), self.config.tau).mean()
        else:
            cont = self.attract_own_key(out, key)
        terms = {"cls": soft_cross_entropy(out.logits, l).mean(), "cont": cont}
        return Step(terms["cls"] + self.config.w_cont * cont, terms, {"weak": out, "strong": key})

    @torch.no_grad()
    def refine(self, batch: Batch, step: Step) -> None:
        """The target and the prototypes from the weak view, the queue from the strong one, the key encoder follows."""
        out, key = step.outs["weak"], step.outs["strong"]
        label = self.label(batch.index, out)
        self.remember(batch.index, self.target(batch.index, out))
        self.z.copy_(moved(self.z, out.q, label, self.config.z_decay))
        self.enqueue(key.q, label)
        self.follow()

    @torch.no_grad()
    def label(self, index: Tensor, out: Out) -> Tensor:
        """(B,) the candidate of which the network is surest."""
        return (out.logits + self.log_trust(index)).argmax(1)

    @torch.no_grad()
    def target(self, index: Tensor, out: Out) -> Tensor:
        """(B, C): phi l + (1 - phi) e, the target moved towards the candidate with the nearest prototype."""
        c, held = self.config, self.recall(index)
        if not self.after(c.warm):
            return held
        nearest = (out.q @ self.z.T / c.tau + self.log_trust(index)).argmax(1)
        phi = c.phi_first + int(self.epoch) / self.total_epochs * (c.phi_last - c.phi_first)
        return phi * held + (1 - phi) * F.one_hot(nearest, held.shape[1])

    def log_trust(self, index: Tensor) -> Tensor:
        """(B, C): log of what a label's score is multiplied with, 1 on S and 0 outside."""
        return self.S[index].float().log()

    def recall(self, index: Tensor) -> Tensor:
        return self.l[index]

    def remember(self, index: Tensor, target: Tensor) -> None:
        self.l[index] = target

    def rest(self, key: Out, label: Tensor) -> tuple[Tensor, Tensor]:
        """(B + queue, d) and (B + queue,): all that a query is compared with besides the batch's other queries."""
        return torch.cat([key.q, self.queue]), torch.cat([label, self.queue_label])

    def attract_own_key(self, out: Out, key: Out) -> Tensor:
        """MoCo: -log of exp(q . k) over exp(q . k) + sum over the queue."""
        own = (out.q * key.q).sum(1, keepdim=True)
        logits = torch.cat([own, out.q @ self.queue.T], 1) / self.config.tau
        return F.cross_entropy(logits, torch.zeros(len(own), dtype=torch.long, device=own.device))

    def enqueue(self, keys: Tensor, label: Tensor) -> Tensor:
        """The newest keys take the oldest places, which are returned."""
        size = len(self.queue)
        place = (self.pointer + torch.arange(len(keys), device=keys.device))[-size:] % size
        self.queue[place] = keys[-size:]
        self.queue_label[place] = label[-size:]
        self.pointer.add_(len(keys)).remainder_(size)
        return place

    def follow(self) -> None:
        # NOTE: the paper's decay is constant, 0.999: an average over 1000 steps, more than a short run has. The first
        # steps are averaged over a shorter time, as those of the loop's averaged weights are.
        steps = int(self.steps)
        decay = min(self.config.key_decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(list(self.key.parameters()), list(self.net.parameters()), 1 - decay)
        self.steps.add_(1)


def attract_label(q: Tensor, label: Tensor, rest: Tensor, rest_label: Tensor, n_classes: int, tau: float) -> Tensor:
    """(B,): -mean over p in P of log( exp(q . p / tau) / sum over a in A of exp(q . a / tau) ), where A is the other
    queries and the rest, and P those of A with the query's label."""
    return log_everyone(q, rest, tau) - label_mean(q, label, rest, rest_label, n_classes) / tau


def log_everyone(q: Tensor, rest: Tensor, tau: float) -> Tensor:
    """(B,): log of the sum over A. exp cannot overflow, because |q . a| is at most 1 and tau at least 0.02."""
    queries = (q @ q.T / tau).fill_diagonal_(-torch.inf)  # no query is in its own A
    return (queries.exp().sum(1) + ExpSum.apply(q, rest, tau)).log()


class ExpSum(torch.autograd.Function):
    """(B,): sum over the rows a of keys of exp(q . a / tau); keys are constants. The gradient, the same sum with each
    term times a / tau, is made at once: the (B, keys) matrix, large beside a small network, does not live long."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, tau: float) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # half precision has no room for exp(1 / tau)
            e = ((q.float() / tau) @ keys.float().T).exp_()
            ctx.save_for_backward(e @ keys.float() / tau)
        return e.sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][:, None] * ctx.saved_tensors[0], None, None


def label_mean(q: Tensor, label: Tensor, rest: Tensor, rest_label: Tensor, n_classes: int) -> Tensor:
    """(B,): the mean over P of q . p, from the sum of each label's embeddings: no (B, A) mask, half of the time."""
    member = F.one_hot(label, n_classes).to(q.dtype)  # (B, C)
    rest_member = F.one_hot(rest_label + 1, n_classes + 1)[:, 1:].to(q.dtype)  # -1 is nobody's label
    total = member.T @ q + rest_member.T @ rest  # (C, d)
    count = member.sum(0) + rest_member.sum(0)  # (C,)
    return (q * (total[label] - q)).sum(1) / (count[label] - 1)  # without the query itself


def moved(z: Tensor, q: Tensor, label: Tensor, decay: float) -> Tensor:
    """z_c <- decay z_c + (1 - decay) q_i for each item i of label c in turn, then normalised: all items at once.

    An item's share has decayed once for every later item of its label.
    """
    member = F.one_hot(label, len(z)).to(q.dtype)  # (B, C)
    later = (member.flip(0).cumsum(0).flip(0) * member).sum(1) - 1  # (B,) later items with the same label
    share = member * ((1 - decay) * decay**later)[:, None]
    return F.normalize(z * (decay ** member.sum(0))[:, None] + share.T @ q, dim=1)
