"""What neighbours in plain image space know before any training: a first label distribution, without a network.

Each item's neighbours vote with the likelihood of their candidate sets. On Fashion-MNIST with eta = mu = 0.5 the vote
names the true label of 80 % of the items, where a random candidate would be right for 14 %.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.data.stream import Items, Streamed
from urrl.distributed import every, everyone, mean, share, total
from urrl.knn import cosine_topk
from urrl.labels import Rows, weighted_rows
from urrl.likelihood import estimate_mu, set_gain, set_log_likelihood_of

SHARPNESS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the vote
FINELY = tuple(0.03 * 1.085**i for i in range(44))  # the same, up to 1
GRID = (0.1, 0.2, 0.35, 0.5, 0.65)  # of mu
PIXELS = 100_000  # filtered at once: 51 MB of responses by 128 filters


def principal_components(x: Tensor, d: int, whiten: bool = False) -> Tensor:
    """(n, ...) -> (n, d): the first components, found on about 10,000 rows; with `whiten` of equal variance, but for
    those with next to none. Of several processes each has its share of the n."""
    x = x.flatten(1).float()
    some = everyone(x[every(max(1, total(len(x)) // 10_000), len(x))])
    mean = some.mean(0)
    centred = some - mean
    if centred.shape[1] <= len(centred):
        variance, axes = _eigh(centred.T @ centred / len(centred))
    else:  # more features than rows: the same components from the products of the rows, which are fewer
        variance, within = _eigh(centred @ centred.T / len(centred))
        lengths = (variance * len(centred)).clamp_min(1e-30).sqrt()
        axes = centred.T @ (within * (variance > 1e-6 * variance[-1]) / lengths)  # the rest is rounding
    z = (x - mean) @ axes[:, -d:]
    return z / (variance[-d:] + 1e-4 * variance[-1]).clamp_min(1e-30).sqrt() if whiten else z


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and vectors. Single precision need not converge where most of a matrix is zero."""
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        values, vectors = torch.linalg.eigh(matrix.cpu().double())
        return values.to(matrix), vectors.to(matrix)


def patch_features(x: Tensor, filters: int = 128, side: int = 6) -> Tensor:
    """Images (n, ch, H, W) uint8 -> (n, 8 filters): single-layer features after Coates & Ng. The filters are random
    patches of the images themselves, at most as many as there are, in the whitened space of patches; responses are
    rectified both ways and pooled over quadrants. Of several processes each has its share of the n."""
    rng = torch.Generator().manual_seed(0)
    images = everyone(x[every(max(1, total(len(x)) // 4000), len(x))]).float() / 255
    patches = F.unfold(images, side, stride=side).transpose(1, 2).flatten(0, 1)  # (many, ch side side)
    patches = patches[torch.randperm(len(patches), generator=rng)[:40_000].to(x.device)]
    floor = 10 / 255  # of a patch's variance, so that flat patches stay small
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches / (patches.var(1, keepdim=True) + floor).sqrt()
    mean = patches.mean(0)
    variance, axes = _eigh((patches - mean).T @ (patches - mean) / len(patches))
    whiten = axes @ torch.diag((variance + 0.1).rsqrt()) @ axes.T
    bank = F.normalize((patches[:filters] - mean) @ whiten, dim=1) @ whiten  # (filters, ch side side)
    kernel = (bank - bank.mean(1, keepdim=True)).view(len(bank), -1, side, side)
    # Made at once: small results that come between large buffers would keep malloc from using those again.
    features = torch.empty(len(x), 8 * len(bank), device=x.device)
    for rows in torch.arange(len(x), device=x.device).split(max(1, PIXELS // x.shape[2:].numel())):
        z = x[rows].float() / 255
        local = F.avg_pool2d(torch.stack([z.mean(1), z.square().mean(1)], 1), side, 1)  # mean and square of each patch
        deviation = (local[:, 1] - local[:, 0] ** 2 + floor).sqrt()[:, None]
        response = F.conv2d(z, kernel) / deviation - (bank @ mean)[:, None, None]
        both = torch.cat([F.relu(response - 0.5), F.relu(-response - 0.5)], 1)
        features[rows] = F.adaptive_avg_pool2d(both, 2).flatten(1)
    return features


class Vote(NamedTuple):
    """What neighbours say with their sets: for each class the summed log-likelihood of the sets, sharpened."""

    near: Tensor  # (m, k) int32, nearest first, for each row of this process: all n, where it is alone
    S: Tensor | Rows
    gain: Tensor  # (n,) log P(S | y in S) - log P(S | y not in S); the rest of a set's likelihood is alike for all y
    sharp: float  # neighbours are not independent
    mu: float

    def score(self, places: Tensor) -> Tensor:
        """(b, C) log-likelihoods of the neighbours' sets, the item's own set left out, for some of those rows."""
        near = (self.near[part].long() for part in places.split(4096))
        return torch.cat([weighted_rows(self.S, part, self.gain[part]) for part in near])

    def on(self, places: Tensor) -> Tensor:
        """(b, C) probabilities."""
        return F.softmax(self.sharp * self.score(places), 1)


def ballot(features: Tensor, S: Tensor | Rows, k: int = 200, mu: float | None = None) -> Vote:
    """The vote of an item's neighbours among unit vectors (n, d), of which each of several processes has its share.

    How many of the k neighbours vote, mu, and how sharp the vote is are chosen without labels, by the likelihood of the
    items' own sets: over a grid, because it has local optima, on about 5,000 rows. Give mu where the features were
    learned from the sets: an item then sits among those that agree with its own set, and mu would come out too small.
    """
    n, n_classes = S.shape
    k = min(k, max(10, n // (4 * n_classes)))  # a quarter of a class: more would reach into others
    rows = torch.arange(n, device=S.device)[share(n)]
    near = torch.cat([i.gather(1, s.argsort(1, descending=True)).int() for _, s, i in cosine_topk(features, k)])
    some = every(max(1, n // 5000), len(rows)).to(S.device)
    own, grid, likelihoods = S[rows[some]], [], []
    for rate in GRID if mu is None else (mu,):
        gain = set_gain(S, rate)
        for part in sorted({max(1, k // 8), max(1, k // 4), max(1, k // 2), k}):
            score = Vote(near[:, :part], S, gain, 1.0, rate).score(some)
            for sharp in SHARPNESS:
                grid.append((part, rate, sharp))
                likelihoods.append(set_log_likelihood_of(F.softmax(sharp * score, 1), own, rate))
    _, (part, rate, sharp) = max(zip(mean(torch.stack(likelihoods)).tolist(), grid))
    vote = Vote(near[:, :part], S, set_gain(S, rate), sharp, rate)
    # A vote that is too sure or not sure enough looks like another mu, so both are chosen together once more, finely.
    for _ in range(2 if mu is None else 1):  # the gains follow mu
        score = vote.score(some)
        votes = [F.softmax(sharp * score, 1) for sharp in FINELY]
        rates = [estimate_mu(f, own, mean) if mu is None else mu for f in votes]
        likelihoods = [set_log_likelihood_of(f, own, rate) for f, rate in zip(votes, rates)]
        best = int(mean(torch.stack(likelihoods)).argmax())
        vote = Vote(vote.near, S, set_gain(S, rates[best]), FINELY[best], rates[best])
    if mu is None:
        many = every(max(1, n // 100_000), len(rows)).to(S.device)
        vote = vote._replace(mu=estimate_mu(vote.on(many), S[rows[many]], mean))
    return vote


def raw_features(x: Items) -> Tensor:
    """Unit vectors of raw items; of several processes, of its share of them. Colour images need features: for 12,000
    images of CIFAR-10 at eta = mu = 0.3 the vote on these is right for half of them. Grey images and feature vectors
    are taken as they are."""
    x = x[share(len(x))]
    if isinstance(x, Streamed):
        x = x.small()
    if x.dim() == 4 and x.shape[1] == 3 and min(x.shape[2:]) >= 12:
        z = principal_components(patch_features(x), 128, whiten=True)
    else:
        z = principal_components(x, 48)
    return F.normalize(z, dim=1)
