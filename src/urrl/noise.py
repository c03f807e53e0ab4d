"""How bad are my labels: the unreliable and the partial rate, from predictions and candidate sets alone.

Under the paper's generation model (see likelihood.py) P(S | y) is eta^(|S| - 1) (1 - eta)^(C - |S|) times a factor of
mu, so the two rates separate: eta is a matter of the sets' sizes, mu of where the predictions lie. The true label is
missing in the share mu (1 - eta) of the sets. The predictions must not have seen the sets that they are held against;
one temperature, fitted together with mu, allows for predictions that are too sure or not sure enough. What tells a
wrong prediction from a wrong set is that the predictions are surer of some rows than of others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from urrl.errors import UserError
from urrl.likelihood import set_log_likelihood_of
from urrl.seeding import generator
from urrl.warmstart import ballot, raw_features

MU = torch.linspace(0.001, 0.95, 96)[:, None]
TEMPERATURES = tuple(0.35 * 1.085**i for i in range(31))  # up to 4; close together: mu follows the choice
RESAMPLES = 500
ROWS = 5000  # at most, evenly spaced


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


class Noise(NamedTuple):
    missing: Estimate  # share of the sets without the true label
    mu: Estimate  # unreliable rate: the label was corrupted
    eta: Estimate  # partial rate: a wrong label entered the set
    rows: int  # held-out rows that the estimate stands on


def estimate_noise(f: Tensor, S: Tensor, level: float = 0.9, seed: int = 0) -> Noise:
    """From predictions f (n, C) for rows whose sets S (n, C) they have not seen; intervals by the bootstrap over the
    rows. Rows that name every class say nothing and are left out."""
    said = (~S.all(1)).nonzero().squeeze(1)
    said = said[:: max(1, len(said) // ROWS)]
    f, S = f[said].cpu(), S[said].cpu()
    n, C = S.shape
    if n < 2:
        raise UserError(f"the noise is estimated from at least 2 rows with candidate sets, not {n}")
    weights = torch.cat([torch.ones(1, n), _resampled(n, seed)])  # the first is the sample itself
    tables = [set_log_likelihood_of(_tempered(f, t), S, MU) for t in TEMPERATURES]  # (grid of mu, n) each
    likelihood = torch.stack([weights @ table.T for table in tables])  # (temperatures, resamples, grid)
    mu = MU[likelihood.amax(0).argmax(1), 0]
    eta = torch.tensor([_truncated_rate(float(m), C - 1) for m in weights @ (S.sum(1) - 1.0) / weights.sum(1)])
    return Noise(_estimate(mu * (1 - eta), level), _estimate(mu, level), _estimate(eta, level), n)


def noise_by_vote(x: Tensor, S: Tensor) -> Noise | None:
    """The same for items x and their sets alone: the predictions are the votes of each item's neighbours, which leave
    its own set out. None where fewer than two sets say anything."""
    if int((~S.all(1)).sum()) < 2:
        return None
    return estimate_noise(ballot(raw_features(x), S).on(torch.arange(len(S), device=S.device)), S)


def _tempered(f: Tensor, temperature: float) -> Tensor:
    return (f.clamp_min(1e-12).log() / temperature).softmax(1)


def _resampled(n: int, seed: int) -> Tensor:
    """(RESAMPLES, n): how often each row is drawn."""
    drawn = torch.randint(n, (RESAMPLES, n), generator=generator(seed, "bootstrap"))
    return torch.zeros(RESAMPLES, n).scatter_add_(1, drawn, torch.ones(RESAMPLES, n))


def _truncated_rate(mean: float, m: int) -> float:
    """The p of a binomial variable on m draws that is never m, from its mean: by bisection."""
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(40):
        p = (low + high) / 2
        full = p**m
        if (m * p - m * full) / (1 - full) < mean:
            low = p
        else:
            high = p
    return (low + high) / 2


def _estimate(values: Tensor, level: float) -> Estimate:
    low, high = values[1:].quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return Estimate(float(values[0]), min(low, float(values[0])), max(high, float(values[0])))
