"""Candidate sets: the observed rates match the formulas, and what is saved comes back."""

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from urrl.candidates import CONVENTIONS, CandidateSets, generate, uniform_transition
from urrl.errors import UserError
from urrl.evaluate import true_in_set

N = 40_000
RATES = [(0.1, 0.1), (0.3, 0.5), (0.5, 0.3), (0.9, 0.9)]


def labels(C, n=N):
    return torch.arange(n) % C


def observed(convention, eta, mu, C=10):
    """(share of sets without the true label, mean size, share of a given wrong label)"""
    y = labels(C)
    S = generate(y, C, eta, mu, convention, seed=3).mask
    rows = torch.arange(N)
    return 1 - true_in_set(S, y), S.double().sum(1).mean().item(), S[rows, (y + 1) % C].double().mean().item()


def near(p):
    return pytest.approx(p, abs=5 * (0.25 / N) ** 0.5)


@pytest.mark.parametrize(("eta", "mu"), RATES)
@pytest.mark.parametrize("C", [3, 10])
def test_paper_rates(eta, mu, C):
    missing, size, wrong = observed("paper", eta, mu, C)
    assert missing == near(mu * (1 - eta))  # a corrupted item's true label can come back
    assert size == pytest.approx(1 + (C - 1) * eta, rel=0.02)
    assert wrong == near(mu / (C - 1) + (1 - mu / (C - 1)) * eta)


@pytest.mark.parametrize(("eta", "mu"), RATES)
def test_swap_rates(eta, mu):
    C = 10
    missing, size, wrong = observed("swap", eta, mu, C)
    full = eta ** (C - 1)
    assert missing == near(mu * (1 - full))  # a full set has nothing to swap in
    assert size == pytest.approx(1 + (C - 1) * eta, rel=0.02)
    assert wrong == near(eta + mu * (1 - full) / (C - 1))


@pytest.mark.parametrize(("eta", "mu"), RATES)
def test_pico_plus_rates(eta, mu):
    empty = mu * (1 - eta) ** 9
    missing, _, wrong = observed("pico+", eta, mu)
    assert missing == near(mu * (1 - (1 - eta) ** 9) / (1 - empty))
    assert wrong == near(eta / (1 - empty))


@pytest.mark.parametrize(("eta", "mu"), RATES)
def test_fredis_rates(eta, mu):
    missing, _, wrong = observed("fredis", eta, mu)
    none = (1 - eta) ** 9
    assert missing == near(mu)  # a dropped label cannot return
    assert wrong == near(eta + none / 9)


@pytest.mark.parametrize("eta", [0.0, 0.1, 0.7])
def test_clean_conventions(eta):
    y = labels(10)
    clean, forced = (generate(y, 10, eta, 0.0, c, seed=1).mask for c in ("clean", "clean-forced"))
    assert true_in_set(clean, y) == true_in_set(forced, y) == 1
    assert int(forced.sum(1).min()) >= 2
    assert clean.double().sum(1).mean().item() == pytest.approx(1 + 9 * eta, rel=0.02)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_same_seed_same_bytes_other_seed_other_sets(convention):
    mu = 0.0 if convention.startswith("clean") else 0.4
    y = labels(7, 500)
    a, b, c = (generate(y, 7, 0.3, mu, convention, seed) for seed in (5, 5, 6))
    assert a.sha256 == b.sha256 != c.sha256
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert generate(y, 7, 0.3, mu, convention, 5).sha256 == a.sha256  # its own generator, not torch's global one
    torch.set_rng_state(state)


def test_the_corrupted_label_is_always_kept():
    y = labels(6, 5000)
    S = generate(y, 6, 0.0, 0.6, "paper", seed=2).mask  # eta 0: only the kept label is left
    assert (S.sum(1) == 1).all()
    kept = S.int().argmax(1)
    assert (kept != y).double().mean().item() == pytest.approx(0.6, abs=0.03)
    offsets = torch.bincount((kept - y)[kept != y] % 6, minlength=6)[1:].double()
    assert (offsets / offsets.sum()).sub(0.2).abs().max() < 0.03  # any other class alike
    shift = torch.eye(6, dtype=torch.float64).roll(1, 1)  # y -> y + 1, surely
    S = generate(y, 6, 0.4, seed=2, transition=shift).mask
    assert S[torch.arange(5000), (y + 1) % 6].all()


def test_extremes():
    y = labels(4, 100)
    assert generate(y, 4, 1.0, 0.5).mask.all()
    assert torch.equal(generate(y, 4, 0.0, 0.0).mask, CandidateSets.of_labels(y, 4).mask)
    S = generate(y, 4, 0.0, 1.0).mask
    assert true_in_set(S, y) == 0 and (S.sum(1) == 1).all()
    torch.testing.assert_close(uniform_transition(4, 0.3).sum(0), torch.ones(4, dtype=torch.float64))


def test_cifar100_size_takes_well_under_a_second():
    y = labels(100, 50_000)
    generate(y, 100, 0.1, 0.3)
    began = time.perf_counter()
    generate(y, 100, 0.1, 0.3)
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"eta": 1.5}, "eta"),
        ({"eta": float("nan")}, "eta"),
        ({"mu": -0.1}, "mu"),
        ({"convention": "other"}, "convention 'other'"),
        ({"convention": "clean", "mu": 0.1}, "mu must be 0"),
        ({"convention": "pico+", "eta": 0.0, "mu": 1.0}, "only empty sets"),
        ({"transition": torch.ones(5, 5)}, "sums to 1"),
        ({"transition": -torch.eye(5)}, "negative"),
        ({"transition": torch.eye(4)}, "5 classes"),
    ],
)
def test_bad_arguments_are_named(arguments, names):
    with pytest.raises(UserError, match=names):
        generate(labels(5, 10), 5, **({"eta": 0.2, "mu": 0.2} | arguments))


def test_an_empty_row_is_refused_by_its_number():
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2] = False
    with pytest.raises(UserError, match="row 2 is empty"):
        CandidateSets(mask)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(2, 30), st.integers(0, 2**31))
def test_saved_sets_come_back(tmp_path_factory, n, C, seed):
    path = tmp_path_factory.mktemp("sets") / "s.npz"
    sets = generate(labels(C, n), C, 0.3, 0.2, seed=seed)
    sets.save(path)
    back = CandidateSets.load(path)
    assert torch.equal(back.mask, sets.mask) and back.sha256 == sets.sha256 and back.about == sets.about
    assert not list(path.parent.glob("*.part"))


def test_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "s.npz"
    sets = generate(labels(5, 50), 5, 0.3, 0.2)
    sets.save(path)
    good = path.read_bytes()
    flipped = CandidateSets(~sets.mask | torch.eye(5, dtype=torch.bool)[labels(5, 50)])
    np.savez(tmp_path / "lie.npz", bits=np.packbits(flipped.mask.numpy()), shape=np.array([50, 5]),
             about=np.array(json.dumps({"sha256": sets.sha256})))  # fmt: skip
    (tmp_path / "cut.npz").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.npz").write_text("cat|lynx")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "object.npz", bits=np.array([{}], dtype=object), shape=np.array([1, 2]), about=np.array("{}"))
    for name in ("lie", "cut", "text", "other", "object", "missing"):
        with pytest.raises(UserError, match=f"{name}.npz"):
            CandidateSets.load(tmp_path / f"{name}.npz")
