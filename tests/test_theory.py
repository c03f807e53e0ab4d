"""The paper's theory, checked in numbers: the E-step's posterior, lemma 1 and lemma 2."""

import itertools
import math

import numpy as np
import pytest
import torch

from urrl.candidates import generate


def circulant(row):
    """The paper's second example: a general random transition matrix, rows and columns all sum to 1."""
    return np.array([np.roll(row, -k) for k in range(len(row))])


@pytest.mark.parametrize("row", [[0.6, 0.1, 0.1, 0.1, 0.1], [0.5, 0.05, 0.2, 0.05, 0.2], [0.1, 0.2, 0.3, 0.25, 0.15]])
def test_e_step_the_bound_is_tight_at_the_posterior(row):
    """With equal column sums psi, sum_y q(y) log(psi p(x, y) / q(y)) is largest, and equal to log(psi p(x)), at
    q(y) = p(y | x); every other q gives less."""
    T = circulant(row)
    psi = T.sum(0)
    np.testing.assert_allclose(psi, psi[0])
    rng = np.random.default_rng(0)
    joint = rng.random(5)  # p(x, y) for one x
    posterior = joint / joint.sum()

    def bound(q):
        return sum(q[y] * math.log(sum(T[u, y] for u in range(5)) * joint[y] / q[y]) for y in range(5) if q[y] > 0)

    assert bound(posterior) == pytest.approx(math.log(psi[0] * joint.sum()))
    for _ in range(50):
        assert bound(rng.dirichlet(np.ones(5))) < bound(posterior)


def test_unequal_column_sums_break_the_claim():
    """The assumption is needed: without it the best q is not the posterior."""
    weight = np.array([0.5, 1.5, 1.0])
    joint = np.array([0.2, 0.2, 0.2])
    best = weight * joint / (weight * joint).sum()
    posterior = joint / joint.sum()

    def bound(q):
        return float((q * np.log(weight * joint / q)).sum())

    assert bound(best) > bound(posterior) + 1e-3


def clusters(seed, n=60, d=5, C=3):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(n, d))
    g /= np.linalg.norm(g, axis=1, keepdims=True)
    return g, rng.integers(0, C, n)


def mean_lengths(g, y):
    n = len(g)
    return [((y == c).sum() / n, np.linalg.norm(g[y == c].mean(0))) for c in np.unique(y)]


@pytest.mark.parametrize("seed", range(5))
def test_lemma_1_scatter_is_one_minus_the_weighted_squared_lengths(seed):
    """sum ||g - delta||^2 = n - n sum_c n_c/n ||delta_c||^2, so its argmin is the argmax of the latter; and
    because the embeddings are on the sphere ||delta|| <= 1, which makes it a lower bound of the likelihood's
    sum_c n_c/n ||delta_c||."""
    g, y = clusters(seed)
    n = len(g)
    scatter = sum(np.sum((g[y == c] - g[y == c].mean(0)) ** 2) for c in np.unique(y))
    parts = mean_lengths(g, y)
    assert scatter == pytest.approx(n - n * sum(w * r**2 for w, r in parts))
    assert all(0 <= r <= 1 for _, r in parts)
    assert sum(w * r for w, r in parts) >= sum(w * r**2 for w, r in parts)


@pytest.mark.parametrize("seed", range(5))
def test_lemma_1_likelihood_of_the_von_mises_fisher_mixture(seed):
    """sum over clusters of kappa * mean_direction . g equals n kappa sum_c n_c/n ||delta_c||."""
    g, y = clusters(seed)
    kappa, total = 3.0, 0.0
    for c in np.unique(y):
        direction = g[y == c].mean(0) / np.linalg.norm(g[y == c].mean(0))
        total += sum(kappa * float(direction @ v) for v in g[y == c])
    assert total == pytest.approx(len(g) * kappa * sum(w * r for w, r in mean_lengths(g, y)))


def test_lemma_2_alignment_and_scatter_have_the_same_minimiser_on_the_sphere():
    """With one-hot l the alignment term -g.p/tau and ||g - p||^2/(2 tau) differ by a constant for unit p: they
    have the same argmin and the same gradient direction along the sphere. Also found by descent."""
    rng = np.random.default_rng(0)
    p = rng.normal(size=4)
    p /= np.linalg.norm(p)
    tau = 0.3
    points = rng.normal(size=(500, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    align = -points @ p / tau
    scatter = ((points - p) ** 2).sum(1) / (2 * tau)
    np.testing.assert_allclose(scatter - align, np.full(500, 1 / tau), rtol=1e-9)
    v = torch.tensor(points[0], requires_grad=True)
    optimiser = torch.optim.SGD([v], 0.05)
    for _ in range(500):
        optimiser.zero_grad()
        g = v / v.norm()
        (-(g @ torch.tensor(p)) / tau).backward()
        optimiser.step()
    np.testing.assert_allclose((v / v.norm()).detach().numpy(), p, atol=1e-3)


def test_generated_sets_follow_the_transition_matrix():
    """P(S | y) = sum_v T[y, v] h(S, v) of the generation model, observed for every set of 3 classes."""
    T = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]], dtype=torch.float64)
    eta, n = 0.3, 60_000
    for y in range(3):
        S = generate(torch.full((n,), y), 3, eta, convention="paper", seed=y, transition=T).mask
        for members in itertools.product([0, 1], repeat=3):
            expected = 0.0
            for v in range(3):
                if members[v]:
                    others = [members[c] for c in range(3) if c != v]
                    expected += float(T[y, v]) * math.prod(eta if m else 1 - eta for m in others)
            observed = (torch.tensor(members, dtype=torch.bool) == S).all(1).double().mean().item()
            assert observed == pytest.approx(expected, abs=5 * math.sqrt(0.25 / n))
