"""The likelihood of a candidate set under the paper's generation model, and what it says about mu.

Label u is recorded as v with T[u, v] (kept with 1 - mu, else any other alike), v enters S, every other class enters
with eta. Up to a factor that does not depend on y, P(S | y) is

    inside  = 1 - mu + (|S| - 1) mu / (C - 1)   for y in S
    outside =              |S|   mu / (C - 1)   for y not in S

so a set speaks of y only through "y in S", and -log of sum_y f_y P(S | y) is a consistent loss under unreliability.
With mu = 0 it is the classifier-consistent loss, CC.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from urrl.labels import Rows


def log_odds(S: Tensor | Rows, mu: float | Tensor) -> tuple[Tensor, Tensor]:
    """(log inside, log outside), (n,) each."""
    size, C = S.sum(1).float(), S.shape[1]
    mu = torch.as_tensor(mu, dtype=torch.float32, device=S.device)
    return torch.log(1 - mu + (size - 1) * mu / (C - 1)), torch.log(size * mu / (C - 1))


def log_given(S: Tensor, mu: float | Tensor) -> Tensor:
    """log P(S_i | y = c), (n, C), up to a constant a row."""
    inside, outside = log_odds(S, mu)
    return torch.where(S, inside[:, None], outside[:, None])


def set_gain(S: Tensor | Rows, mu: float | Tensor) -> Tensor:
    """log inside - log outside, (n,): what a set says for each of its classes over every other."""
    inside, outside = log_odds(S, mu)
    return inside - outside


def set_nll(logits: Tensor, S: Tensor, mu: float | Tensor) -> Tensor:
    """-log sum_y f_y P(S | y), (B,)."""
    return evidence_nll(logits, log_given(S, mu))


def evidence_nll(logits: Tensor, said: Tensor) -> Tensor:
    """-log sum_y f_y exp(said_y), (B,), for any evidence that speaks for the labels, as log-likelihoods (B, C)."""
    logits = logits.float()
    return logits.logsumexp(1) - (logits + said).logsumexp(1)


def mean_of_rows(likelihood: Tensor) -> Tensor:
    return likelihood.mean(-1)


def set_log_likelihood(f: Tensor, S: Tensor, mu: float | Tensor) -> Tensor:
    """The mean over the items of log sum_y f_y P(S | y), for probabilities f (n, C); mu (m, 1) gives m of them."""
    return mean_of_rows(set_log_likelihood_of(f, S, mu))


def set_log_likelihood_of(f: Tensor, S: Tensor, mu: float | Tensor) -> Tensor:
    """The same of each item, (n,) or (m, n)."""
    on_set = (f * S).sum(1).clamp(1e-6, 1 - 1e-6)
    inside, outside = log_odds(S, mu)
    return torch.logaddexp(on_set.log() + inside, (1 - on_set).log() + outside)


def estimate_mu(f: Tensor, S: Tensor, mean: Callable[[Tensor], Tensor] = mean_of_rows) -> float:
    """The mu under which the sets as given are likeliest, for predictions f (n, C). Concave in mu, so a grid and then a
    finer one around its best point find it. `mean` of the items' likelihoods: where the items are on several processes,
    `distributed.mean`."""
    low, high = 1e-3, 0.95
    for _ in range(3):
        grid = torch.linspace(low, high, 17, device=S.device)[:, None]
        best = int(mean(set_log_likelihood_of(f, S, grid)).argmax())
        low, high = float(grid[max(0, best - 1)]), float(grid[min(16, best + 1)])
    return (low + high) / 2
