"""What neighbours in plain image space know before any training: a first label distribution, without a network.

Each item's neighbours vote with the likelihood of their candidate sets. On Fashion-MNIST with eta = mu = 0.5 the vote
names the true label of 80 % of the items, where a random candidate would be right for 14 %.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.knn import cosine_topk
from urrl.likelihood import estimate_mu, log_given, set_log_likelihood

SHARPNESS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
GRID = (0.1, 0.2, 0.35, 0.5, 0.65)  # of mu


def principal_components(x: Tensor, d: int, whiten: bool = False) -> Tensor:
    """(n, ...) -> (n, d): the first components, found on about 10,000 rows; with `whiten` of equal variance, but for
    those with next to none."""
    x = x.flatten(1).float()
    some = x[:: max(1, len(x) // 10_000)]
    mean = some.mean(0)
    variance, axes = torch.linalg.eigh((some - mean).T @ (some - mean) / len(some))  # ascending
    z = (x - mean) @ axes[:, -d:]
    return z / (variance[-d:] + 1e-4 * variance[-1]).sqrt() if whiten else z


def patch_features(x: Tensor, filters: int = 128, side: int = 6) -> Tensor:
    """Images (n, ch, H, W) uint8 -> (n, 8 filters): single-layer features after Coates & Ng. The filters are random
    patches of the images themselves in the whitened space of patches; responses are rectified both ways and pooled
    over quadrants."""
    rng = torch.Generator().manual_seed(0)
    images = x[torch.randperm(len(x), generator=rng)[:4000].to(x.device)].float() / 255
    patches = F.unfold(images, side, stride=side).transpose(1, 2).flatten(0, 1)  # (many, ch side side)
    patches = patches[torch.randperm(len(patches), generator=rng)[:40_000].to(x.device)]
    floor = 10 / 255  # of a patch's variance, so that flat patches stay small
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches / (patches.var(1, keepdim=True) + floor).sqrt()
    mean = patches.mean(0)
    variance, axes = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
    whiten = axes @ torch.diag((variance + 0.1).rsqrt()) @ axes.T
    bank = F.normalize((patches[:filters] - mean) @ whiten, dim=1) @ whiten  # (filters, ch side side)
    kernel = (bank - bank.mean(1, keepdim=True)).view(filters, -1, side, side)
    features = []
    for part in x.split(500):
        z = part.float() / 255
        local = F.avg_pool2d(torch.stack([z.mean(1), z.square().mean(1)], 1), side, 1)  # mean and square of each patch
        deviation = (local[:, 1] - local[:, 0] ** 2 + floor).sqrt()[:, None]
        response = F.conv2d(z, kernel) / deviation - (bank @ mean)[:, None, None]
        both = torch.cat([F.relu(response - 0.5), F.relu(-response - 0.5)], 1)
        features.append(F.adaptive_avg_pool2d(both, 2).flatten(1))
    return torch.cat(features)


def neighbour_vote(features: Tensor, S: Tensor, k: int = 200, mu: float | None = None) -> tuple[Tensor, float]:
    """(P (n, C), mu): for each item the classes by the summed log-likelihood of its neighbours' sets, the item's own
    set left out.

    How many of the k neighbours vote, mu, and how sharp the vote is (neighbours are not independent) are chosen without
    labels, by the likelihood of the items' own sets: over a grid, because it has local optima, on at most 5,000 rows.
    Give mu where the features were learned from the sets: an item then sits among those that agree with its own set,
    and mu would come out too small.
    """
    k = min(k, max(10, len(S) // (4 * S.shape[1])))  # a quarter of a class: more would reach into others
    near = torch.cat([i.gather(1, s.argsort(1, descending=True)) for _, s, i in cosine_topk(features, k)])  # (n, k)
    some = torch.arange(0, len(S), max(1, len(S) // 5000), device=S.device)
    best = (-torch.inf, k, GRID[0], SHARPNESS[0])
    for rate in GRID if mu is None else (mu,):
        given = log_given(S, rate)
        for part in sorted({max(1, k // 8), max(1, k // 4), max(1, k // 2), k}):
            score = _sum_over(near[some, :part], given)
            for sharp in SHARPNESS:
                likelihood = set_log_likelihood(F.softmax(sharp * score, 1), S[some], rate)
                best = max(best, (float(likelihood), part, rate, sharp))
    _, part, rate, sharp = best
    P = F.softmax(sharp * _sum_over(near[:, :part], log_given(S, rate)), 1)
    return P, estimate_mu(P, S) if mu is None else mu


def _sum_over(near: Tensor, given: Tensor) -> Tensor:
    """(n, k) neighbours, (n, C) log-likelihoods -> (n, C) sums."""
    return torch.cat([F.embedding_bag(part, given, mode="sum") for part in near.split(4096)])


def first_vote(x: Tensor, S: Tensor) -> tuple[Tensor, float]:
    """The vote for raw items. Colour images need features: for 12,000 images of CIFAR-10 at eta = mu = 0.3 the vote on
    these is right for half of them. Grey images and feature vectors are taken as they are."""
    if x.dim() == 4 and x.shape[1] == 3 and min(x.shape[2:]) >= 12:
        z = principal_components(patch_features(x), 128, whiten=True)
    else:
        z = principal_components(x, 48)
    return neighbour_vote(F.normalize(z, dim=1), S)
