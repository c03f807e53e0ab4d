"""The set likelihood against the generation model itself, and mu found again from the sets alone."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from urrl import warmstart
from urrl.candidates import generate
from urrl.likelihood import estimate_mu, log_given, set_log_likelihood, set_nll
from urrl.warmstart import ballot, patch_features, principal_components, raw_features


def literal(S, y, C, eta, mu):
    """P(S | y): over the label v that is recorded, T[y, v] times the chance of the other members."""
    total = 0.0
    for v in S:
        T = 1 - mu if v == y else mu / (C - 1)
        total += T * math.prod(eta if c in S else 1 - eta for c in range(C) if c != v)
    return total


@pytest.mark.parametrize(("eta", "mu"), [(0.3, 0.2), (0.5, 0.5), (0.1, 0.9)])
def test_given_is_the_generation_model_up_to_a_factor(eta, mu):
    C = 4
    masks = [m for m in itertools.product([False, True], repeat=C) if any(m)]
    fast = log_given(torch.tensor(masks), mu)
    for mask, row in zip(masks, fast.tolist()):
        S = {c for c in range(C) if mask[c]}
        slow = [math.log(literal(S, y, C, eta, mu)) for y in range(C)]
        differences = [a - b for a, b in zip(row, slow)]
        assert max(differences) - min(differences) < 1e-5


def test_nll_is_the_literal_sum_and_cc_without_corruption():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 5, generator=rng)
    S = generate(torch.arange(20) % 5, 5, 0.4, 0.3).mask
    f = logits.softmax(1)
    slow = [
        -math.log(sum(f[i, c].item() * math.exp(log_given(S, 0.3)[i, c].item()) for c in range(5))) for i in range(20)
    ]
    torch.testing.assert_close(set_nll(logits, S, 0.3), torch.tensor(slow))
    torch.testing.assert_close(set_nll(logits, S, 0.0), -(f * S).sum(1).log())  # CC
    assert set_log_likelihood(f, S, 0.3).item() == pytest.approx(-sum(slow) / 20, rel=1e-5)
    assert torch.isfinite(set_nll(torch.tensor([[300.0, -300.0]]), torch.tensor([[False, True]]), 1e-3)).all()


@pytest.mark.parametrize("mu", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_mu_is_found_again_from_right_predictions(eta, mu):
    y = torch.arange(20_000) % 10
    S = generate(y, 10, eta, mu, seed=4).mask
    f = F.one_hot(y, 10).float() * 0.98 + 0.002
    assert estimate_mu(f, S) == pytest.approx(mu, abs=0.04)


def blobs(n=1500, C=5, d=8):
    rng = torch.Generator().manual_seed(1)
    y = torch.arange(n) % C
    return 4 * F.normalize(torch.randn(C, d, generator=rng), dim=1)[y] + torch.randn(n, d, generator=rng), y


def test_neighbours_know_most_labels_before_any_training():
    x, y = blobs()
    S = generate(y, 5, 0.4, 0.4).mask
    vote = ballot(F.normalize(x, dim=1), S, k=50)
    P, mu = vote.on(torch.arange(len(x))), vote.mu
    torch.testing.assert_close(P.sum(1), torch.ones(len(y)))
    assert (P.argmax(1) == y).double().mean() > 0.9
    assert mu == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize(("eta", "mu"), [(0.1, 0.1), (0.3, 0.1), (0.3, 0.3), (0.5, 0.3), (0.5, 0.5)])
def test_neighbours_of_other_classes_do_not_pass_for_wrong_sets(eta, mu):
    """Clusters that overlap, so that neighbours are right for seven items in ten: how sure they may be and mu are hard
    to tell apart, and a coarse choice of the one would be off in the other."""
    rng = torch.Generator().manual_seed(1)
    y = torch.arange(4000) % 10
    centres = F.normalize(torch.randn(10, 8, generator=rng), dim=1)
    x = F.normalize(centres[y] + 0.4 * torch.randn(4000, 8, generator=rng), dim=1)
    assert ballot(x, generate(y, 10, eta, mu, seed=1).mask).mu == pytest.approx(mu, abs=0.028)


def test_an_items_own_set_has_no_vote_on_itself():
    x, y = blobs(300)
    S = generate(y, 5, 0.4, 0.4).mask
    other = S.clone()
    other[7] = ~other[7]
    other[7, 0] = True
    row, changed = (ballot(F.normalize(x, dim=1), sets, k=20).on(torch.tensor([7])) for sets in (S, other))
    assert row.argmax() == changed.argmax()


def test_components_of_few_rows_are_those_of_their_covariance():
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 41)
    centred = (x - x.mean(0)).double()
    variance, axes = torch.linalg.eigh(centred.T @ centred / 12)
    for whiten, d in itertools.product((False, True), (5, 20)):  # 20: more than there are
        z = principal_components(x, d, whiten).double()
        slow = centred @ axes[:, -d:]
        slow = slow / (variance[-d:] + 1e-4 * variance[-1]).sqrt() if whiten else slow
        torch.testing.assert_close(z @ z.T, slow @ slow.T, rtol=1e-3, atol=1e-3 * float((slow @ slow.T).abs().max()))
    assert torch.isfinite(principal_components(torch.ones(3, 100_000), 48, whiten=True)).all()  # in little memory


def test_features_of_images():
    x = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features = patch_features(x, filters=16)
    assert features.shape == (60, 8 * 16) and torch.isfinite(features).all()
    z = principal_components(features, 10, whiten=True)
    torch.testing.assert_close(z.var(0, correction=0), torch.ones(10), rtol=1e-2, atol=1e-2)
    P = ballot(raw_features(x), generate(torch.arange(60) % 3, 3, 0.3, 0.3).mask).on(torch.arange(60))
    assert P.shape == (60, 3) and torch.isfinite(P).all()


def test_a_process_without_images_has_no_patch_features(monkeypatch):
    """Of more processes than images: the others send it what filters are made of."""
    x = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8)
    monkeypatch.setattr(warmstart, "everyone", lambda own: x)
    assert patch_features(x[:0], filters=16).shape == (0, 8 * 16)


@pytest.mark.skipif(sys.platform != "linux", reason="keep_memory speaks to glibc")
def test_patch_features_of_many_images_take_little_memory():
    """In a process that keeps what it frees, as a training does: malloc must find its buffers again."""
    code = """
import resource, torch
from urrl.allocator import keep_memory
from urrl.warmstart import patch_features
keep_memory()
torch.set_num_threads(1)
x = torch.randint(256, (2000, 3, 32, 32), dtype=torch.uint8)
patch_features(x[:100])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB
before = peak()
patch_features(x)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 600
