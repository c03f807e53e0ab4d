"""The two rates found again where the truth is known."""

import math

import pytest
import torch
import torch.nn.functional as F

from urrl.candidates import generate
from urrl.errors import UserError
from urrl.noise import _truncated_rate, estimate_noise


def predictions(y, C, seed=0):
    """Calibrated: each row has a confidence of its own from 0.5 to 1, and is right with that probability."""
    rng = torch.Generator().manual_seed(seed)
    confidence = 1 - torch.rand(len(y), generator=rng).square() / 2
    wrong = (y + torch.randint(1, C, y.shape, generator=rng)) % C
    label = torch.where(torch.rand(len(y), generator=rng) < confidence, y, wrong)
    rest = ((1 - confidence) / (C - 1))[:, None]
    return F.one_hot(label, C) * (confidence[:, None] - rest) + rest


@pytest.mark.parametrize(("eta", "mu"), [(0.1, 0.1), (0.3, 0.3), (0.5, 0.5), (0.1, 0.5), (0.5, 0.1)])
def test_the_rates_are_found_again(eta, mu):
    y = torch.arange(4000) % 10
    S = generate(y, 10, eta, mu, seed=1).mask
    noise = estimate_noise(predictions(y, 10), S)
    for estimate, true in ((noise.mu, mu), (noise.eta, eta), (noise.missing, mu * (1 - eta))):
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.low - 0.03 <= true <= estimate.high + 0.03
    assert noise.mu.high - noise.mu.low < 0.2 and noise.eta.high - noise.eta.low < 0.02
    assert noise.rows == int((~S.all(1)).sum())


def test_predictions_that_are_too_sure_are_tempered():
    y = torch.arange(4000) % 10
    S = generate(y, 10, 0.3, 0.3, seed=1).mask
    sure = (predictions(y, 10).log() * 2).softmax(1)
    assert estimate_noise(sure, S).mu.value == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize("power", [1.1, 1.15, 1.2, 1.25])
def test_predictions_that_are_a_little_too_sure_do_not_move_mu(power):
    """Too sure and mu are hard to tell apart: with few temperatures to choose from, mu makes up for the difference."""
    y = torch.arange(4000) % 10
    S = generate(y, 10, 0.1, 0.1, seed=1).mask
    sure = (predictions(y, 10).log() * power).softmax(1)
    assert estimate_noise(sure, S).mu.value == pytest.approx(0.1, abs=0.02)


def test_unlabelled_rows_do_not_count():
    y = torch.arange(2000) % 10
    S = generate(y, 10, 0.3, 0.3, seed=1).mask
    some = S.clone()
    some[::2] = True
    half, f = estimate_noise(predictions(y, 10), some), predictions(y, 10)
    assert half == estimate_noise(f[1::2], S[1::2]) and half.rows == 1000
    with pytest.raises(UserError, match="at least 2 rows"):
        estimate_noise(f, torch.ones_like(S))


@pytest.mark.parametrize("p", [0.05, 0.4, 0.8])
def test_the_rate_of_a_truncated_binomial(p):
    m = 4
    chance = [math.comb(m, k) * p**k * (1 - p) ** (m - k) for k in range(m)]
    mean = sum(k * c for k, c in enumerate(chance)) / sum(chance)
    assert _truncated_rate(mean, m) == pytest.approx(p, abs=1e-6)
