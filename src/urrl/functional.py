"""Algebra that the methods share. Shapes: logits, p, l are (B, C); S is (B, C) bool; losses are (B,)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.distributed import partners


def uniform_on(S: Tensor) -> Tensor:
    return S.float() / S.sum(1, keepdim=True)


def softmax_on(S: Tensor, logits: Tensor) -> Tensor:
    """softmax restricted to S and renormalised there: exact zeros outside, no underflow to an empty row, not even where
    all logits on S are infinite."""
    largest = torch.finfo(torch.float32).max
    return logits.float().clamp(-largest, largest).masked_fill(~S, -torch.inf).softmax(1)


def renormalise_on(S: Tensor, p: Tensor) -> Tensor:
    """p restricted to S and rescaled to sum 1; where p has no mass left on S, uniform on S."""
    kept = p.float() * S
    mass = kept.sum(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(mass >= tiny, kept / mass.clamp_min(tiny), uniform_on(S))


def log_one_minus_softmax(logits: Tensor) -> Tensor:
    """log(1 - f_j) for every class, finite for any finite logits.

    Only the largest f_j can come close to 1; for that one 1 - f is summed from the other classes.
    """
    logp = F.log_softmax(logits.float(), 1)
    top = logp.argmax(1, keepdim=True)
    of_top = logp.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    of_rest = torch.log1p(-logp.scatter(1, top, -1.0).exp())  # -1: any harmless value, replaced next
    return of_rest.scatter(1, top, of_top)


def complement_nll(logits: Tensor, S: Tensor) -> Tensor:
    """-sum over j not in S of log(1 - f_j)."""
    return -log_one_minus_softmax(logits).masked_fill(S, 0).sum(1)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * F.log_softmax(logits.float(), 1)).sum(1)


def entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(1)


def kl_to(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target || softmax(logits)), with 0 log 0 = 0."""
    return soft_cross_entropy(logits, target) - entropy(target)


def draw_lambda(alpha: float) -> Tensor:
    """From Beta(alpha, alpha). Single precision has no room for others: of a smaller alpha it draws 1/2, not 0 or 1."""
    alpha = min(max(alpha, 1e-5), 1e30)
    return torch.distributions.Beta(alpha, alpha).sample()


def mixup(x: Tensor, target: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Items and targets mixed with random partners of the batch: one lambda from Beta(alpha, alpha), the larger part
    the item's own."""
    lam = draw_lambda(alpha).to(x.device)
    lam = torch.maximum(lam, 1 - lam)
    partner = torch.randperm(len(target)).to(x.device)
    return lam * x + (1 - lam) * partners(x, partner), lam * target + (1 - lam) * target[partner]
