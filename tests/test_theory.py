"""The paper's theory, checked in numbers: the E-step's posterior, lemma 1 and lemma 2, and the figures per epoch."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import integrate, special

from tests.tools import blob_method, distribution_on, random_sets, unit_rows
from urrl.candidates import generate
from urrl.methods.urrl import URRL, prototypes
from urrl.nets import Out
from urrl.theory import em_figures, log_vmf_normaliser


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


# ---- the figures per epoch -------------------------------------------------------------------------------


def literal_figures(f, q, S, l, z, tau):
    """As the paper writes them, item by item."""
    n, C = f.shape
    d = q.shape[1]
    H: dict[int, list[int]] = {c: [] for c in range(C)}
    for i in range(n):
        H[max((c for c in range(C) if S[i, c]), key=lambda c: float(f[i, c]))].append(i)
    delta = {c: sum(q[i] for i in items) / len(items) for c, items in H.items() if items}
    compactness = sum(len(H[c]) / n * math.sqrt(float(delta[c] @ delta[c])) for c in delta)
    alignment = 0.0
    for i in range(n):
        p = sum(l[i, c] * z[c] for c in range(C))
        alignment += -float(q[i] @ p) / tau / n
    kappa = compactness * (d - compactness**2) / (1 - compactness**2)
    order = d / 2 - 1
    normaliser = kappa**order / ((2 * math.pi) ** (d / 2) * special.iv(order, kappa))
    bound = 0.0
    for c, direction in delta.items():
        for i in H[c]:
            bound += math.log(normaliser * math.exp(kappa * float(direction @ q[i]) / float(direction.norm())) / C) / n
    return {"em_bound": bound, "em_alignment": alignment, "em_compactness": compactness}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("d", [3, 8, 50])
def test_figures_are_the_paper_s(seed, d):
    rng = torch.Generator().manual_seed(seed)
    n, C = 40, 4
    S = random_sets(n, C, rng)
    logits, q, l = torch.randn(n, C, generator=rng), unit_rows(n, d, rng), distribution_on(S, rng)
    S[:, -1] &= S.sum(1) > 1  # hardly anything in the last cluster
    S[~S.any(1), 0] = True
    z = prototypes(q, l)
    expected = literal_figures(logits.softmax(1).double(), q.double(), S, l.double(), z.double(), 0.3)
    assert em_figures(Out(logits, q, q), S, l, z, 0.3) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("d", "kappa"), [(3, 0.5), (3, 20.0), (5, 2.0), (16, 30.0)])
def test_the_density_integrates_to_one(d, kappa):
    """Over the angle to the mean direction: the sphere of R^(d-1) of radius sin has the area that stands in front."""
    area = 2 * math.pi ** ((d - 1) / 2) / math.gamma((d - 1) / 2)
    total, _ = integrate.quad(lambda a: math.exp(kappa * math.cos(a)) * math.sin(a) ** (d - 2), 0, math.pi)
    assert log_vmf_normaliser(d, kappa) == pytest.approx(-math.log(area * total), abs=1e-8)


@pytest.mark.parametrize("kappa", [1.0, 5.0, 60.0, 4000.0])
@pytest.mark.parametrize("d", [42, 64, 200])
def test_both_ways_to_the_bessel_function_agree(d, kappa):
    order = d / 2 - 1
    exact = order * math.log(kappa) - d / 2 * math.log(2 * math.pi) - math.log(special.ive(order, kappa)) - kappa
    assert log_vmf_normaliser(d, kappa) == pytest.approx(exact, abs=1e-4)


def test_extremes_are_finite():
    """All embeddings the same, a huge embedding, clusters that cancel out."""
    S = torch.ones(4, 2, dtype=torch.bool)
    f, l = torch.full((4, 2), 0.5), torch.full((4, 2), 0.5)
    one = torch.eye(4096)[:1].expand(4, -1)
    opposite = one * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    same = em_figures(Out(f, one, one), S, l, prototypes(one, l), 0.3)
    assert same["em_compactness"] == pytest.approx(1) and same["em_alignment"] == pytest.approx(-1 / 0.3)
    apart = em_figures(Out(f, opposite, opposite), S, l, prototypes(opposite, l), 0.3)
    assert apart["em_compactness"] == 0 and same["em_bound"] > apart["em_bound"]
    assert all(math.isfinite(v) for figures in (same, apart) for v in figures.values())


def test_tighter_clusters_have_a_higher_bound():
    rng = torch.Generator().manual_seed(0)
    S = torch.ones(60, 3, dtype=torch.bool)
    cluster = torch.arange(60) % 3
    f = torch.nn.functional.one_hot(cluster, 3).float()
    noise = torch.randn(60, 8, generator=rng)
    figures = []
    for spread in (2.0, 1.0, 0.5, 0.1):
        q = torch.nn.functional.normalize(3 * torch.eye(8)[cluster] + spread * noise, dim=1)
        figures.append(em_figures(Out(f, q, q), S, f, prototypes(q, f), 0.3))
    for better, worse in itertools.pairwise(reversed(figures)):
        assert better["em_bound"] > worse["em_bound"] and better["em_compactness"] > worse["em_compactness"]
        assert better["em_alignment"] < worse["em_alignment"]


def test_an_epoch_of_urrl_records_them_without_another_pass():
    rng = torch.Generator().manual_seed(0)
    S = random_sets(30, 4, rng)
    method = blob_method(URRL, S)
    out = Out(torch.randn(30, 4, generator=rng), unit_rows(30, 16, rng), torch.randn(30, 16, generator=rng))
    asked = mock.Mock(return_value=out)
    figures = method.begin_epoch(0, asked)
    asked.assert_called_once_with()
    expected = em_figures(out, method.S, method.l, method.z, method.config.tau)
    assert {key: figures[key] for key in expected} == expected
