"""URRL: Unreliability-Robust Representation Learning (Shi, Wu, Geng, Zhang).

S (n, C) candidate sets, l (n, C) dynamic label distribution, q (n, d) unit-norm embeddings, z (C, d) prototypes,
f softmax output. One epoch: prototypes z from l; S grows by the KNN vote; then for every batch
L = L_Sup + w_m L_m + w_CR L_CR, a step, and l follows the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.functional import complement_nll, kl_to, soft_cross_entropy
from urrl.knn import cosine_topk
from urrl.methods.base import Batch, Method, Step
from urrl.nets import Network, Out


@dataclass(frozen=True)
class URRLConfig:
    w_m: float = option(5.0, "weight of the mixup prototypical contrastive loss L_m", 0)
    w_cr: float = option(1.0, "weight of the consistency regularisation L_CR", 0)
    tau: float = option(0.3, "temperature of the prototypes and of the KNN weights", 1e-4)
    k: int = option(200, "neighbours K that vote in the correction", 1)
    phi: float = option(0.7, "a label outside S enters it where its share of the vote exceeds this", 0, 1)
    alpha: float = option(8.0, "mixup draws lambda from Beta(alpha, alpha)", 0.05)
    ramp_epochs: int = option(0, "epochs over which w_m and w_cr grow from zero; 0 = none", 0)
    correct_from_epoch: int = option(0, "first epoch (from 0) that begins with a correction of S", 0)
    use_m: bool = option(True, "L_m on (ablation)")
    use_cr: bool = option(True, "L_CR on (ablation)")
    use_correction: bool = option(True, "correction of S on (ablation)")


class URRL(Method):
    Config = URRLConfig
    views = ("weak", "strong")
    config: URRLConfig
    z: Tensor
    added: Tensor
    ramp: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: URRLConfig):
        super().__init__(net, sets, config)
        self.register_buffer("z", torch.zeros(sets.n_classes, net.embed_dim))
        self.register_buffer("added", torch.full(sets.mask.shape, -1, dtype=torch.int16))  # epoch of an addition
        self.register_buffer("ramp", torch.ones(()))

    @torch.no_grad()
    def begin_epoch(self, epoch: int, infer: Callable[[], Out]) -> dict[str, float]:
        c = self.config
        self.ramp.fill_(min(1.0, (epoch + 1) / c.ramp_epochs) if c.ramp_epochs else 1.0)
        out = infer()
        self.z.copy_(prototypes(out.q, self.l))
        if not c.use_correction or epoch < c.correct_from_epoch:
            return {"corrected_now": 0}
        rows, labels, share = corrections(out.logits.softmax(1), out.q, self.l, self.S, c.k, c.tau, c.phi)
        self.S[rows, labels] = True
        self.added[rows, labels] = epoch
        # NOTE: the paper does not say what l becomes; the new label enters with its share of the vote.
        self.l[rows, labels] = share
        self.l[rows] /= self.l[rows].sum(1, keepdim=True)
        return {"corrected_now": len(rows)}

    def loss(self, batch: Batch) -> Step:
        c = self.config
        S, l = self.S[batch.index], self.l[batch.index]
        views = dict(batch.views)
        if c.use_m:
            # NOTE: the paper mixes "x_i"; we mix the weak view, with one lambda a batch.
            lam = torch.distributions.Beta(c.alpha, c.alpha).sample().to(l.device)
            partner = torch.randperm(len(l)).to(l.device)
            views["mixed"] = lam * views["weak"] + (1 - lam) * views["weak"][partner]
        outs = self.forward_views(views)
        terms = {"sup": complement_nll(outs["weak"].logits, S).mean()}
        total = terms["sup"]
        if c.use_m:
            # L_pc is the soft cross-entropy of q z^T / tau with target l, because l sums to 1; L_m is linear in it.
            target = lam * l + (1 - lam) * l[partner]
            terms["m"] = soft_cross_entropy(outs["mixed"].q @ self.z.T / c.tau, target).mean()
            total = total + self.ramp * c.w_m * terms["m"]
        if c.use_cr:
            # NOTE: the paper prints a leading minus, which would drive f away from l: a misprint.
            terms["cr"] = (kl_to(outs["weak"].logits, l) + kl_to(outs["strong"].logits, l)).mean()
            total = total + self.ramp * c.w_cr * terms["cr"]
        return Step(total, terms, outs)


def prototypes(q: Tensor, l: Tensor) -> Tensor:
    """z_c = Normalize(mean over i of q_i l_i^c): (C, d)."""
    return F.normalize(l.T @ q / len(q), dim=1)


def corrections(f: Tensor, q: Tensor, l: Tensor, S: Tensor, k: int, tau: float, phi: float
                ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows, labels, shares) of what enters S: argmax of pi = f/2 + vote/2 where it is outside S and above phi.

    The vote is at most 1, so pi_c > phi needs f_c > 2 phi - 1: only rows with such a class outside S can change,
    and only those are searched. Exact.
    """
    slack = 1e-5  # for the rounding of the vote's sum
    possible = (f.masked_fill(S, 0).amax(1) > 2 * phi - 1 - slack).nonzero().squeeze(1)
    rows, labels, shares = [], [], []
    for row, similarity, neighbour in cosine_topk(q, k, possible):
        w = (similarity / tau).softmax(1)  # (b, K)
        vote = F.embedding_bag(neighbour, l, per_sample_weights=w, mode="sum")  # (b, C): sum over K of w l
        share, label = (f[row] / 2 + vote / 2).max(1)
        enters = (share > phi) & ~S[row, label]
        rows.append(row[enters])
        labels.append(label[enters])
        shares.append(share[enters])
    if not rows:
        none = torch.empty(0, dtype=torch.long, device=f.device)
        return none, none, torch.empty(0, device=f.device)
    return torch.cat(rows), torch.cat(labels), torch.cat(shares)
