"""Small random states and methods for the tests."""

import torch

from urrl.candidates import CandidateSets
from urrl.nets import build_network

PAPER_FORM = {"start": "uniform", "vote": "labels", "one_view": "", "alpha": 8.0, "w_m": 5.0}  # of URRL


def random_sets(n, C, rng):
    """(n, C) bool, no row empty, no row full."""
    S = torch.rand(n, C, generator=rng) < 0.4
    rows = torch.arange(n)
    S[rows, torch.randint(0, C - 1, (n,), generator=rng)] = True
    full = S.all(1)
    S[full, -1] = False
    return S


def as_sets(S):
    return [set(row.nonzero().squeeze(1).tolist()) for row in S]


def unit_rows(n, d, rng):
    return torch.nn.functional.normalize(torch.randn(n, d, generator=rng), dim=1)


def distribution_on(S, rng):
    return torch.randn(S.shape, generator=rng).masked_fill(~S, -torch.inf).softmax(1)


def blob_method(kind, S, config=None, d=12, width=16, seed=0):
    """A method on feature vectors of size d with a small network."""
    torch.manual_seed(seed)
    net = build_network("mlp", (d,), S.shape[1], width, 16, "linear")
    method = kind(net, CandidateSets(S), config or kind.Config())
    method.shape = (d,)
    return method
