"""URRL: Unreliability-Robust Representation Learning (Shi, Wu, Geng, Zhang).

S (n, C) candidate sets, l (n, C) dynamic label distribution, q (n, d) unit-norm embeddings, z (C, d) prototypes,
f softmax output. One epoch: prototypes z from l; S grows by the KNN vote; then for every batch
L = L_Sup + w_m L_m + w_CR L_CR, a step, and l follows the network.

That is the paper, and the default. Switches make it learn in a fraction of the time, and the recipe `fast` sets them:
`start="vote"`, `vote="sets"`, `one_view="weak"` and `learn="sets"`. Each is explained where it acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.config import option
from urrl.data.stream import Items
from urrl.distributed import everyone, partners, share, summed
from urrl.errors import UserError
from urrl.functional import complement_nll, draw_lambda, kl_to, renormalise_on, soft_cross_entropy
from urrl.knn import cosine_topk
from urrl.labels import DENSE, Rows, own_blocks, row_blocks, weighted_rows
from urrl.likelihood import evidence_nll, log_given
from urrl.methods.base import Batch, Method, Step
from urrl.nets import Network, Out
from urrl.theory import em_figures
from urrl.warmstart import Vote, ballot, principal_components, raw_features

MEMORY = 0.5  # of what the network said at former looks, where labels become sure
PAUSE = 3  # epochs from one such look at all items to the next: labels that are sure seldom change
PARTING = 3  # looks at all items when a scout ends
UNSURE, UNTAUGHT = -1, -2  # in place of a label: of an item, or for a member that learns from the sets alone


@dataclass(frozen=True)
class URRLConfig:
    w_m: float = option(5.0, "weight of the mixup prototypical contrastive loss L_m", 0)
    w_cr: float = option(1.0, "weight of the consistency regularisation L_CR", 0)
    tau: float = option(0.3, "temperature of the prototypes and of the KNN weights", 1e-4)
    k: int = option(200, "neighbours K that vote in the correction", 1)
    phi: float = option(0.7, "a label outside S enters it where its share of the vote exceeds this", 0, 1)
    adapt: bool = option(
        False, "phi needs no choice: 1/2 where sets vote, else a threshold for each class after the confidence"
    )
    alpha: float = option(8.0, "mixup draws lambda from Beta(alpha, alpha); 0 = no mixing", 0)
    ramp_epochs: int = option(0, "epochs over which w_m and w_cr grow from zero; 0 = none", 0)
    correct_from_epoch: int = option(0, "first epoch (from 0) that begins with a correction of S", 0)
    use_m: bool = option(True, "L_m on (ablation)")
    use_cr: bool = option(True, "L_CR on (ablation)")
    use_correction: bool = option(True, "correction of S on (ablation)")
    start: str = option("uniform", "first l: uniform on S, or the vote of neighbours in image space",
                        choices=("uniform", "vote"))  # fmt: skip
    vote: str = option("labels", "neighbours vote with their l (the paper) or with the likelihood of their sets",
                       choices=("labels", "sets"))  # fmt: skip
    voting: float = option(1.0, "vote=sets: the share of the epochs that begin with a vote", 0, 1)
    learn: str = option("labels", "one_view learns l, or from the likelihood of the sets, own and neighbours'",
                        choices=("labels", "sets"))  # fmt: skip
    sure: float = option(0.0, "learn=sets: a label with more than this share of what the network and the set say is "
                         "learned from a strong view, by every second of several members; 0 = never", 0, 1)  # fmt: skip
    sure_from: float = option(
        0.4, "labels may be sure after this share of the epochs, and once the votes have ended", 0, 1
    )
    sure_own: float = option(1.0, "power of the own set's likelihood when labels become sure for the first time: the "
                             "opinion of a network that has learned the set holds some of it", 0, 1)  # fmt: skip
    sure_again: float = option(
        0.0, "after a scout labels stay as sure as they were, up to this share of the epochs", 0, 1
    )
    sure_prior: float = option(0.0, "power of the network's former opinion of an item whose label is not sure, beside "
                               "the likelihood of its set, in what is learned of it", 0, 1)  # fmt: skip
    sure_strong: float = option(
        1.0, "chance that a sure label is learned from a strong view, not from a weak one", 0, 1
    )
    fade: float = option(0.0, "share of the epochs, the last ones, in which the sets of items whose label is not sure "
                         "count less and less", 0, 1)  # fmt: skip
    one_view: str = option("", "L_m and L_CR on this one view, mixed, without L_Sup; empty: the paper's three views",
                           choices=("", "weak", "strong"))  # fmt: skip

    def __post_init__(self) -> None:
        if self.one_view and not (self.use_m or self.use_cr):
            raise UserError("option one_view learns from L_m and L_CR: one of use_m and use_cr must be on")
        if self.one_view and self.vote == "labels":
            raise UserError("option one_view takes vote=sets: vote=labels makes l from two views of a step")
        if self.sure and (not self.one_view or self.learn != "sets" or self.alpha):
            raise UserError("option sure takes one_view, learn=sets and alpha=0 (or --set sure=0)")


class URRL(Method):
    Config = URRLConfig
    views: tuple[str, ...] = ("weak", "strong")
    config: URRLConfig
    evidence: Any  # (n, C) on S, as l: what the sets say of an item, without the network
    others: Tensor  # (n,) how much of it speaks for the labels outside S
    opinion: Tensor  # (n, C) the network's, a mean over the epochs, the last ones most
    known: Tensor  # (n,) the label where it is sure, or UNSURE
    heed: Tensor  # what the sets of the others count, from 1 down to 0
    z: Tensor
    ramp: Tensor
    mu: Tensor

    def __init__(self, net: Network, sets: CandidateSets, config: URRLConfig):
        super().__init__(net, sets, config)
        self.register_buffer("z", torch.zeros(sets.n_classes, net.embed_dim))
        self.keep_additions()
        self.register_buffer("ramp", torch.ones(()))
        self.register_buffer("mu", torch.tensor(-1.0))  # the unreliable rate by the first vote; negative: none yet
        if config.one_view:
            self.views = (config.one_view,)
        if config.one_view and config.learn == "sets":
            self.register_buffer("others", torch.zeros(len(self.S)))
            if self.kept is None:
                self.register_buffer("evidence", self.l.clone())
            else:
                self.evidence = self.kept.with_evidence()
        if config.sure:
            if self.kept is not None:
                raise UserError(f"option sure takes at most {DENSE:,} entries of items times classes")
            self.register_buffer("opinion", torch.zeros(self.S.shape))
            self.register_buffer("known", torch.full((len(self.S),), UNSURE))
            self.register_buffer("heed", torch.ones(()))

    @torch.no_grad()
    def prepare(self, x: Items) -> None:
        """start="vote": a uniform l makes the prototypes almost parallel and keeps pi below phi for many epochs; the
        neighbours in plain image space know better."""
        if self.config.start == "vote":
            self._follow(ballot(raw_features(x), self.S), None, epoch=0)

    @torch.no_grad()
    def begin_epoch(self, epoch: int, infer: Callable[..., Out]) -> dict[str, float]:
        c = self.config
        self.ramp.fill_(min(1.0, (epoch + 1) / c.ramp_epochs) if c.ramp_epochs else 1.0)
        teaching = self._teaches(epoch)
        if teaching:
            self.views = (c.one_view, "strong")
            left = self.total_epochs - epoch
            self.heed.fill_(min(1.0, left / (c.fade * self.total_epochs)) if c.fade else 1.0)
        if self._settled(epoch):
            return {"corrected_now": 0, **self._sure_share()}
        looks = [infer(turn) for turn in self._turns(epoch)] if teaching else [infer()]
        out = looks[0]
        if c.vote == "labels":
            self.z.copy_(prototypes(out.q, self.l))
            if c.use_correction and epoch >= c.correct_from_epoch:
                f = out.logits.softmax(1)
                phi = class_thresholds(f, self.S) if c.adapt else c.phi
                rows, labels, share = corrections(f, out.q, self.l, self.S, c.k, c.tau, phi)
                # NOTE: the paper does not say what l becomes; the new label enters with its share of the vote.
                self.enter(rows, labels, share, epoch)
        else:
            if epoch > 0 or c.start == "uniform":
                vote = None
                if self.mu < 0 or epoch < self.epochs_in(c.voting):
                    # Whitened: in the embedding as it is, the neighbours are those that the network gave the same
                    # label, and the vote repeats it; the directions that do not tell the classes apart find others.
                    z = F.normalize(principal_components(out.feature, 128, whiten=True), dim=1)
                    vote = ballot(z, self._sets(), c.k, self.mu.item() if self.mu >= 0 else None)
                said = [self._remembered(look.logits) for look in looks] if teaching else [out.logits]
                self._follow(vote, said[-1], epoch)
            self.z.copy_(prototypes(out.q, self.l))
        now = sum(int((self.added[rows] == epoch).sum()) for rows in row_blocks(self.added))
        return {"corrected_now": now, **em_figures(out, self.S, self.l, self.z, c.tau), **self._sure_share()}

    def _sure_share(self) -> dict[str, float]:
        return {"sure": float((self.known != UNSURE).float().mean())} if self.config.sure else {}

    def _settled(self, epoch: int) -> bool:
        """learn="sets", and the neighbours are silent: what is learned of an item is its own set, which stays as it is,
        so a look at all items before the epoch would be for l, S and z alone. They wait for the last epoch, where
        it is known which that is."""
        c = self.config
        learns_l = not c.one_view or c.learn == "labels" or c.vote == "labels"
        # After a scout the new network has to learn before it is asked.
        rests = self.scouted and self.scouted < epoch < self.epochs_in(c.sure_again)
        turns = (epoch - self._first_taught()) % PAUSE == 0 and not rests
        asks = self._teaches(epoch) and (turns or epoch == self.scouted)
        looks = learns_l or self.may_stop or asks
        return not looks and self._silent() < epoch < self.total_epochs - 1

    def _silent(self) -> int:
        """The first epoch without a vote: there is always one at first."""
        return max(1, self.epochs_in(self.config.voting))

    def _teaches(self, epoch: int) -> bool:
        return self.config.sure > 0 and epoch >= self._first_taught()

    def _first_taught(self) -> int:
        return max(self._silent(), self.epochs_in(self.config.sure_from))

    def _turns(self, epoch: int) -> list[int]:
        """Whose turn it is of the looks, where labels may be sure: each time another's. At its end a scout has more."""
        turn = (epoch - self._first_taught()) // PAUSE
        return list(range(turn, turn + PARTING)) if self.scouted and epoch == self.scouted else [turn]

    def _remembered(self, logits: Tensor) -> Tensor:
        """What the network said of this process's rows in former epochs, each time of another look, and now, as logits:
        a mean of many looks for the work of one."""
        own = self.opinion[share(len(self.S))]
        own = MEMORY * own + (1 - MEMORY) * logits.softmax(1)  # zero before the first: p does not depend on the scale
        self.opinion.copy_(everyone(own))
        return own.clamp_min(1e-12).log()

    def _sets(self) -> Tensor | Rows:
        """S as it was given."""
        return self.S & (self.added < 0) if self.kept is None else self.kept.given

    def _follow(self, vote: Vote | None, logits: Tensor | None, epoch: int) -> None:
        """vote="sets": l is what the neighbours' sets, as they were given, and the network say together, times the
        likelihood of the item's own set. A vote by the neighbours' l repeats what the network believes; the sets are
        fresh evidence at every epoch, and the more alike the neighbours become, the more of it adds up.
        vote, logits: of this process's rows; None: nobody votes any more; there is no network yet."""
        c = self.config
        if vote is not None:
            self.mu.fill_(vote.mu)
        teaching = self._teaches(epoch)
        for rows, places in own_blocks(self.S):
            own = log_given(self.given(rows), self.mu)
            voices = [] if vote is None else [vote.on(places).clamp_min(1e-8).log()]
            heard = voices[0] * (1 - epoch / self.epochs_in(c.voting)) if voices and epoch else sum(voices)
            if logits is not None:
                voices.append(logits[places].log_softmax(1))
            trust = c.sure_own if teaching and epoch == self._first_taught() else 1.0
            p = (torch.stack(voices).mean(0) + trust * own).softmax(1)
            if c.use_correction and epoch >= c.correct_from_epoch:
                best, label = p.max(1)
                # p is a probability: a label with more than half of it is likelier than all others together
                enters = (best > (0.5 if c.adapt else c.phi)) & ~self.S[rows].gather(1, label[:, None]).squeeze(1)
                self.enter(everyone(rows[enters]), everyone(label[enters]), everyone(best[enters]), epoch)
            self.l[everyone(rows)] = everyone(renormalise_on(self.S[rows], p))
            if c.one_view and c.learn == "sets":
                # The neighbours are a start; what they have wrong, the network would learn with the rest.
                self.keep_evidence(rows, (heard + own).softmax(1))
            if teaching:
                best, label = p.max(1)
                self.known[everyone(rows)] = everyone(label.masked_fill(best <= c.sure, UNSURE))

    def keep_evidence(self, rows: Tensor, p: Tensor) -> None:
        """What the sets alone say of these rows: label by label on S, and how much speaks for all other labels."""
        S = self.S[rows]
        self.evidence[everyone(rows)] = everyone(renormalise_on(S, p))
        self.others[everyone(rows)] = everyone(p.masked_fill(S, 0).sum(1))

    def evidence_of(self, rows: Tensor) -> Tensor:
        """(b, C), rows sum to 1; alike for all labels outside S."""
        S, others = self.S[rows], self.others[rows, None]
        return torch.where(S, (1 - others) * self.evidence[rows], others / (~S).sum(1, keepdim=True).clamp_min(1))

    def loss(self, batch: Batch) -> Step:
        return self._one_view_loss(batch) if self.config.one_view else self._paper_loss(batch)

    def _paper_loss(self, batch: Batch) -> Step:
        c = self.config
        S, l = self.S[batch.index], self.l[batch.index]
        views = dict(batch.views)
        if c.use_m:
            # NOTE: the paper mixes "x_i"; we mix the weak view, with one lambda a batch.
            lam, partner = self._mixing(batch.index)
            views["mixed"] = lam * views["weak"] + (1 - lam) * partners(views["weak"], partner)
        outs = self.forward_views(Batch(batch.index, views))
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

    def _one_view_loss(self, batch: Batch) -> Step:
        """one_view: a third of the work a step. What is learned holds the evidence of the sets already, so L_Sup has
        nothing to add; mixing keeps the network from memorising what is wrong in it."""
        c = self.config
        n, own = len(batch.index), share(len(batch.index))  # no row needs another's outputs: each process has its own
        x, rows = batch.views[c.one_view], batch.index[own]
        taught = None
        if c.sure and "strong" in batch.views:
            taught = self._taught(rows)
            # Items that are not sure are seen in weak views alone. If no others were, the network would learn what to
            # say of such views from their sets, by heart.
            strong = (taught >= 0) & (torch.rand(n)[own].to(x.device) < c.sure_strong)
            x = torch.where(strong.view(-1, *[1] * (x.dim() - 1)), batch.views["strong"], x)
        parts = [(torch.ones(()), rows)]
        if c.alpha:
            lam, partner = self._mixing(batch.index)
            x = lam * x + (1 - lam) * partners(x, partner)
            parts = [(lam, rows), (1 - lam, batch.index[partner[own]])]
        out = self.net(x)
        terms = {}
        if c.use_m:
            terms["m"] = self._misfit(out.q @ self.z.T / c.tau, parts, taught, soft_cross_entropy).sum() / n
        if c.use_cr:
            terms["cr"] = self._misfit(out.logits, parts, taught, kl_to).sum() / n
        weights = {"m": c.w_m, "cr": c.w_cr}
        total = torch.stack([self.ramp * weights[name] * term for name, term in terms.items()]).sum()
        return Step(total, terms, {}, own=True)

    def _taught(self, rows: Tensor) -> Tensor:
        """(b,): the labels of these rows of a batch that are sure, or UNSURE. Of several members every second one has
        them, the others go on with the sets: what the one kind has wrong is not what the other has wrong."""
        parts = [self.known[part] for part in rows.tensor_split(self.net.members)]
        if len(parts) > 1:
            parts[::2] = [torch.full_like(part, UNTAUGHT) for part in parts[::2]]
        return torch.cat(parts)

    def _misfit(self, logits: Tensor, parts: list[tuple[Tensor, Tensor]], taught: Tensor | None,
                to: Callable[[Tensor, Tensor], Tensor]) -> Tensor:  # fmt: skip
        """(b,): of logits for items mixed of parts, (weight, rows) each, to their l by that distance; learn="sets": to
        what the sets say, or to the labels that are taught. There the network's opinion is that of the moment: in an l
        of the last epoch it would confirm itself."""
        if self.config.learn == "labels":
            return to(logits, torch.stack([weight * self.l[rows] for weight, rows in parts]).sum(0))
        if taught is None:
            misfits = [weight * evidence_nll(logits, self.evidence_of(rows).log()) for weight, rows in parts]
            return torch.stack(misfits).sum(0)
        ((_, rows),) = parts  # what is sure is not mixed
        said = F.normalize(self.opinion[rows], p=1, dim=1).clamp_min(1e-6)
        misfit = evidence_nll(logits, self.evidence_of(rows).log() + self.config.sure_prior * said.log())
        misfit = torch.where(taught == UNSURE, self.heed * misfit, misfit)
        return torch.where(taught >= 0, F.cross_entropy(logits.float(), taught.clamp_min(0), reduction="none"), misfit)

    def _mixing(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(lambda, partners) for a batch."""
        alpha = self.config.alpha
        lam = draw_lambda(alpha) if alpha else torch.ones(())
        return lam.to(index.device), torch.randperm(len(index)).to(index.device)

    def refine(self, batch: Batch, step: Step) -> None:
        if self.config.vote == "labels":  # where the sets vote, l waits for the next vote
            super().refine(batch, step)


# Of several processes each has its share of f and q, and all of S and l.


def prototypes(q: Tensor, l: Tensor | Rows) -> Tensor:
    """z_c = Normalize(mean over i of q_i l_i^c): (C, d)."""
    sums = torch.stack([l[rows].T @ q[places] for rows, places in own_blocks(l)]).sum(0)
    return F.normalize(summed(sums) / len(l), dim=1)


def class_thresholds(p: Tensor, S: Tensor | Rows) -> Tensor:
    """(C,): one standard deviation below the mean confidence in each class, over the items whose argmax of p it is and
    that have it in S; at least 1/2. A label enters another item where p is about as sure of it as there."""
    sums = torch.zeros(3, p.shape[1], device=p.device)
    for rows, places in own_blocks(S):
        best, label = p[places].max(1)
        there = S[rows].gather(1, label[:, None]).squeeze(1)
        for power in range(3):
            sums[power].index_add_(0, label[there], best[there].float() ** power)
    count, total, square = summed(sums)
    mean = total / count.clamp_min(1)
    deviation = (square / count.clamp_min(1) - mean**2).clamp_min(0).sqrt()
    return (mean - deviation).clamp_min(0.5)


def corrections(f: Tensor, q: Tensor, l: Tensor | Rows, S: Tensor | Rows, k: int, tau: float, phi: float | Tensor
                ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows, labels, shares) of what enters S: argmax of pi = f/2 + vote/2 where it is outside S and above phi.

    The vote is at most 1, so pi_c > phi needs f_c > 2 phi - 1: only rows with such a class outside S can change,
    and only those are searched. Exact.
    """
    slack = 1e-5  # for the rounding of the vote's sum
    phi = torch.as_tensor(phi, device=q.device).expand(S.shape[1])  # (C,)
    can = [(f[places].masked_fill(S[rows], 0) > 2 * phi - 1 - slack).any(1) for rows, places in own_blocks(S)]
    first = share(len(S)).start
    found = []
    for places, similarity, neighbour in cosine_topk(q, k, torch.cat(can).nonzero().squeeze(1)):
        w = (similarity / tau).softmax(1)  # (b, K)
        vote = weighted_rows(l, neighbour, w)  # (b, C)
        best, label = (f[places] / 2 + vote / 2).max(1)
        rows = first + places
        enters = (best > phi[label]) & ~S[rows].gather(1, label[:, None]).squeeze(1)
        found.append((rows[enters], label[enters], best[enters]))
    rows, label, best = (everyone(torch.cat(part)) for part in zip(*found))
    return rows, label, best
