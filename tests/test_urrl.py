"""The fast URRL agrees with the paper's literal loops, over swept parameters and random states."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests import reference
from tests.tools import as_sets, blob_method, distribution_on, random_sets, unit_rows
from urrl.candidates import generate
from urrl.errors import UserError
from urrl.functional import (
    complement_nll,
    kl_to,
    log_one_minus_softmax,
    renormalise_on,
    soft_cross_entropy,
    softmax_on,
)
from urrl.likelihood import log_given
from urrl.methods import Batch
from urrl.methods.base import Step
from urrl.methods.urrl import UNSURE, UNTAUGHT, URRL, URRLConfig, class_thresholds, corrections, prototypes
from urrl.nets import Out
from urrl.warmstart import ballot, principal_components


def random_state(n, C, d, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, C, generator=rng)
    S = random_sets(n, C, rng)
    return logits, S, unit_rows(n, d, rng), distribution_on(S, rng)


@pytest.mark.parametrize("C", [2, 5, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_complement_loss(C, seed):
    logits, S, _, _ = random_state(12, C, 4, seed)
    f = [reference.softmax(row) for row in logits.double().numpy()]
    slow = [reference.l_sup(f[i], s) for i, s in enumerate(as_sets(S))]
    np.testing.assert_allclose(complement_nll(logits, S).numpy(), slow, rtol=2e-5, atol=1e-6)


def test_complement_loss_of_extreme_logits_is_finite_and_right():
    logits = torch.tensor([[200.0, 0.0, -200.0], [0.0, 0.0, 0.0]], requires_grad=True)
    S = torch.tensor([[False, True, True], [True, False, True]])
    loss = complement_nll(logits, S)
    # f_0 = 1 up to e^-200, and log(1 - f_0) = log f_1 + ... = -200
    np.testing.assert_allclose(loss.detach().numpy(), [200.0, math.log(1.5)], rtol=1e-6)
    loss.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert torch.isfinite(log_one_minus_softmax(torch.tensor([[1e4, -1e4]]))).all()


@pytest.mark.parametrize("d", [2, 16])
def test_prototypes(d):
    _, _, q, l = random_state(30, 6, d, 3)
    np.testing.assert_allclose(prototypes(q, l).numpy(), reference.prototypes(q.numpy(), l.numpy()), atol=1e-5)


@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_mixup_prototypical_loss_equals_the_literal_form(tau, lam):
    from urrl.functional import soft_cross_entropy

    _, _, q, l = random_state(10, 7, 8, 5)
    z = prototypes(q, l)
    partner = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    fast = soft_cross_entropy(q @ z.T / tau, lam * l + (1 - lam) * l[partner])
    z64, l64, q64 = z.double().numpy(), l.double().numpy(), q.double().numpy()
    slow = [reference.l_m(q64[i], l64[i], l64[int(partner[i])], lam, z64, tau) for i in range(10)]
    np.testing.assert_allclose(fast.numpy(), slow, rtol=1e-4, atol=1e-5)
    if lam == 1.0:  # L_m is L_pc
        np.testing.assert_allclose(
            fast.numpy(), [reference.l_pc(q64[i], l64[i], z64, tau) for i in range(10)], rtol=1e-4
        )


def test_consistency_loss():
    weak, _, _, l = random_state(10, 6, 4, 7)
    strong = random_state(10, 6, 4, 8)[0]
    fast = kl_to(weak, l) + kl_to(strong, l)
    slow = [
        reference.l_cr(
            l[i].double().numpy(), reference.softmax(weak[i].tolist()), reference.softmax(strong[i].tolist())
        )
        for i in range(10)
    ]
    np.testing.assert_allclose(fast.numpy(), slow, rtol=1e-4, atol=1e-5)
    assert (fast >= -1e-6).all()


@pytest.mark.parametrize("K", [1, 5, 39, 200])  # 200: more than there are
@pytest.mark.parametrize("tau", [0.1, 0.3])
@pytest.mark.parametrize("phi", [0.3, 0.5, 0.55, 0.7, 1.0])
def test_set_correction(K, tau, phi):
    logits, S, q, l = random_state(40, 4, 3, 11)
    f = logits.softmax(1)
    rows, labels, share = corrections(f, q, l, S, K, tau, phi)
    grown = S.clone()
    grown[rows, labels] = True
    f64, q64, l64 = (t.double().numpy() for t in (f, q, l))
    assert as_sets(grown) == reference.correct(as_sets(S), f64, q64, l64, K, tau, phi)
    for row, label, s in zip(rows.tolist(), labels.tolist(), share.tolist()):
        assert s == pytest.approx(reference.pi(row, f64, q64, l64, K, tau)[label], abs=1e-5)
    if phi == 0.3:
        assert len(rows) > 3  # the case is not empty
    if phi == 1.0:
        assert len(rows) == 0  # no correction at all


def test_label_disambiguation():
    weak, S, _, _ = random_state(15, 8, 4, 13)
    strong = random_state(15, 8, 4, 14)[0]
    method = blob_method(URRL, S)
    outs = {"weak": Out(weak, weak, weak), "strong": Out(strong, strong, strong), "mixed": Out(99 * weak, weak, weak)}
    index = torch.arange(15)
    method.refine(Batch(index, {"weak": weak, "strong": strong}), Step(weak.sum(), {}, outs))
    slow = [
        reference.disambiguate(reference.softmax(weak[i].tolist()), reference.softmax(strong[i].tolist()), s)
        for i, s in enumerate(as_sets(S))
    ]
    np.testing.assert_allclose(method.l.numpy(), slow, atol=1e-6)


def test_label_distribution_survives_a_network_that_is_sure_of_a_non_candidate():
    S = torch.tensor([[False, True, True]])
    l = softmax_on(S, torch.tensor([[1e4, 0.0, -1e4]]))
    np.testing.assert_allclose(l.numpy(), [[0, 1, 0]])
    np.testing.assert_allclose(renormalise_on(S, torch.tensor([[1.0, 0.0, 0.0]])).numpy(), [[0, 0.5, 0.5]])


@pytest.mark.parametrize(
    "switches", [{}, {"use_m": False}, {"use_cr": False}, {"use_m": False, "use_cr": False}, {"ramp_epochs": 4}]
)
def test_total_loss_is_the_weighted_sum_of_its_terms(switches):
    S = random_sets(20, 5, torch.Generator().manual_seed(0))
    method = blob_method(URRL, S, URRLConfig(w_m=3.0, w_cr=0.5, **switches))
    q = unit_rows(20, method.net.embed_dim, torch.Generator().manual_seed(1))
    method.begin_epoch(0, lambda: Out(torch.zeros(20, 5), q, q))
    x = torch.randn(20, *method.shape)
    step = method.loss(Batch(torch.arange(20), {"weak": x, "strong": x + 0.1}))
    ramp = 0.25 if "ramp_epochs" in switches else 1.0
    parts = {"sup": 1.0} | ({"m": 3.0 * ramp} if switches.get("use_m", True) else {})
    parts |= {"cr": 0.5 * ramp} if switches.get("use_cr", True) else {}
    assert step.terms.keys() == parts.keys()
    assert step.total.item() == pytest.approx(sum(w * step.terms[k].item() for k, w in parts.items()), rel=1e-5)


def test_mixed_view_and_its_loss():
    """L_m of a whole step equals the literal form, for the lambda and the partners that it draws."""
    S = random_sets(16, 4, torch.Generator().manual_seed(0))
    method = blob_method(URRL, S, URRLConfig(alpha=2.0)).eval()  # eval: no batch statistics
    q = unit_rows(16, method.net.embed_dim, torch.Generator().manual_seed(1))
    method.begin_epoch(0, lambda: Out(torch.zeros(16, 4), q, q))
    method.l.copy_(distribution_on(S, torch.Generator().manual_seed(2)))
    x = torch.randn(16, *method.shape)
    torch.manual_seed(5)
    step = method.loss(Batch(torch.arange(16), {"weak": x, "strong": x}))
    torch.manual_seed(5)
    lam = torch.distributions.Beta(2.0, 2.0).sample()
    j = torch.randperm(16)
    mixed = method.net(lam * x + (1 - lam) * x[j]).q.detach().double().numpy()
    z, l = method.z.double().numpy(), method.l.double().numpy()
    slow = [reference.l_m(mixed[i], l[i], l[int(j[i])], float(lam), z, 0.3) for i in range(16)]
    assert step.terms["m"].item() == pytest.approx(float(np.mean(slow)), rel=1e-4)
    assert 0.05 < float(lam) < 0.95


def test_a_correction_is_stamped_permanent_and_renormalised():
    S = torch.zeros(30, 3, dtype=torch.bool)
    S[:, 0] = True
    S[15:, 1] = True
    method = blob_method(URRL, S, URRLConfig(k=5, phi=0.7))
    method.l[15:] = torch.tensor([0.0, 1.0, 0.0])
    q = torch.zeros(30, method.net.embed_dim)
    q[:, 0] = 1.0  # all alike: items 0..14 vote 0, items 15.. vote 1, whoever the 5 neighbours are
    logits = torch.zeros(30, 3)
    logits[:, 1] = 8.0
    method.begin_epoch(4, lambda: Out(logits, q, q))
    entered = method.S & ~S
    assert entered.any() and not entered[15:].any() and not entered[:, 2].any()
    assert (method.added[entered] == 4).all() and (method.added[~entered] == -1).all()
    np.testing.assert_allclose(method.l.sum(1).numpy(), 1, atol=1e-6)
    before = method.S.clone()
    method.begin_epoch(5, lambda: Out(torch.zeros(30, 3), q, q))  # nothing is sure any more
    assert torch.equal(method.S, before)


def test_first_correction_epoch_and_switch():
    S = torch.tensor([[True, True, False]] * 10)
    q = unit_rows(10, 16, torch.Generator().manual_seed(0))
    sure = Out(torch.tensor([[0.0, 0.0, 20.0]] * 10), q, q)
    for config, epoch, grows in [
        (URRLConfig(phi=0.4, correct_from_epoch=2), 1, False),
        (URRLConfig(phi=0.4, correct_from_epoch=2), 2, True),
        (URRLConfig(phi=0.4, use_correction=False), 2, False),
    ]:
        method = blob_method(URRL, S, config)
        assert method.begin_epoch(epoch, lambda: sure)["corrected_now"] == (10 if grows else 0)
        assert bool(method.S.all()) is grows


# The switches of the fast recipe


def test_one_view_loss_is_the_weighted_sum_on_one_mixed_view():
    S = random_sets(16, 4, torch.Generator().manual_seed(0))
    method = blob_method(URRL, S, URRLConfig(alpha=2.0, w_m=3.0, w_cr=0.5, one_view="strong", vote="sets")).eval()
    assert method.views == ("strong",)
    q = unit_rows(16, method.net.embed_dim, torch.Generator().manual_seed(1))
    method.begin_epoch(0, lambda: Out(torch.zeros(16, 4), q, q))
    method.l.copy_(distribution_on(S, torch.Generator().manual_seed(2)))
    x = torch.randn(16, *method.shape)
    torch.manual_seed(5)
    step = method.loss(Batch(torch.arange(16), {"strong": x}))
    torch.manual_seed(5)
    lam, j = torch.distributions.Beta(2.0, 2.0).sample(), torch.randperm(16)
    out = method.net(lam * x + (1 - lam) * x[j])
    l, z = method.l.double().numpy(), method.z.double().numpy()
    mixed = out.q.detach().double().numpy()
    target = float(lam) * l + (1 - float(lam)) * l[j.numpy()]
    slow_m = np.mean([reference.l_m(mixed[i], l[i], l[int(j[i])], float(lam), z, 0.3) for i in range(16)])
    slow_cr = np.mean([reference.kl(target[i], reference.softmax(out.logits[i].tolist())) for i in range(16)])
    assert step.terms["m"].item() == pytest.approx(slow_m, rel=1e-4)
    assert step.terms["cr"].item() == pytest.approx(slow_cr, rel=1e-4)
    assert step.total.item() == pytest.approx(3.0 * slow_m + 0.5 * slow_cr, rel=1e-4)


def test_learning_from_sets_is_the_likelihood_of_all_that_they_say():
    """learn="sets": -log of the sum over y of f_y e_y, where e is the vote, to a power that falls from 1 to 0 while
    there are votes, times the likelihood of the item's own set; labels outside S share what is theirs alike. Mixed
    items add up."""
    S = random_sets(30, 4, torch.Generator().manual_seed(0))
    one_view: dict[str, Any] = dict(one_view="weak", vote="sets", learn="sets")
    options = URRLConfig(alpha=2.0, w_m=3.0, w_cr=0.5, phi=0.5, voting=0.5, **one_view)
    method = blob_method(URRL, S, options).eval()
    rng = torch.Generator().manual_seed(1)
    q = unit_rows(30, method.net.embed_dim, rng)
    method.total_epochs = 8
    method.begin_epoch(1, lambda: Out(4 * torch.randn(30, 4, generator=rng), q, q))
    assert (method.S != S).any(), "no label entered: the test says nothing of those"
    z = torch.nn.functional.normalize(principal_components(q, 128, whiten=True), dim=1)
    vote = ballot(z, S, 200)
    said = vote.on(torch.arange(30)) ** 0.75 * log_given(S, vote.mu).exp()
    evidence = np.zeros((30, 4))
    for i in range(30):
        outside = [c for c in range(4) if not method.S[i, c]]
        for c in range(4):
            shared = np.mean([float(said[i, o]) for o in outside]) if c in outside else float(said[i, c])
            evidence[i, c] = shared / float(said[i].sum())
    x = torch.randn(30, *method.shape)
    torch.manual_seed(5)
    step = method.loss(Batch(torch.arange(30), {"weak": x}))
    torch.manual_seed(5)
    lam, j = torch.distributions.Beta(2.0, 2.0).sample(), torch.randperm(30)
    out = method.net(lam * x + (1 - lam) * x[j])

    def slow(logits):
        f = [reference.softmax(row.tolist()) for row in logits]
        own = [-math.log(sum(f[i][c] * evidence[i, c] for c in range(4))) for i in range(30)]
        other = [-math.log(sum(f[i][c] * evidence[int(j[i]), c] for c in range(4))) for i in range(30)]
        return float(lam) * np.mean(own) + (1 - float(lam)) * np.mean(other)

    assert step.terms["cr"].item() == pytest.approx(slow(out.logits), rel=1e-4)
    assert step.terms["m"].item() == pytest.approx(slow(out.q @ method.z.T / 0.3), rel=1e-4)
    assert step.total.item() == pytest.approx(3 * step.terms["m"].item() + 0.5 * step.terms["cr"].item(), rel=1e-5)


@pytest.mark.parametrize(
    "learn, may_stop, voting, sure, looks",
    [
        ("sets", False, 0.5, 0.0, [0, 1, 2, 3, 4, 7]),
        ("sets", False, 0.0, 0.0, [0, 1, 7]),  # the vote before the first epoch is there all the same
        ("sets", False, 0.0, 1.0, [0, 1, 3, 6, 7]),
        ("sets", True, 0.5, 0.0, list(range(8))),
        ("labels", False, 0.5, 0.0, list(range(8))),
    ],
)
def test_all_items_are_looked_at_only_where_something_learned_depends_on_it(learn, may_stop, voting, sure, looks):
    """Of eight epochs, at those with a vote, at the first after them, at every third where labels may be sure, and at
    the last; at all of them where any may be the last."""
    S = random_sets(30, 4, torch.Generator().manual_seed(0))
    options = URRLConfig(
        one_view="weak", vote="sets", learn=learn, voting=voting, phi=0.5, alpha=0.0, sure=sure, sure_from=0.375
    )
    method = blob_method(URRL, S, options)
    method.total_epochs, method.may_stop = 8, may_stop
    rng = torch.Generator().manual_seed(1)
    looked, said = [], []
    for epoch in range(8):

        def look(turn=0, epoch=epoch):
            looked.append(epoch)
            q = unit_rows(30, method.net.embed_dim, rng)
            return Out(4 * torch.randn(30, 4, generator=rng), q, q)

        method.begin_epoch(epoch, look)
        if learn == "sets":
            said.append(method.evidence_of(torch.arange(30)))
    assert looked == looks
    if learn == "sets":
        silent = max(1, round(8 * voting))
        torch.testing.assert_close(said[silent], log_given(S, method.mu).softmax(1))  # the own set alone
        torch.testing.assert_close(said[silent], said[7])
        assert not torch.allclose(said[silent - 1], said[silent])


@pytest.mark.parametrize(("sure_strong", "fade"), [(0.5, 0.5), (0.0, 0.0), (1.0, 0.25), (0.5, 0.4)])
def test_sure_labels_are_learned_from_strong_views(sure_strong, fade):
    """sure: from a share of the run on, what the network said in every third epoch, half as heavy each time before,
    times the likelihood of the own set; a label with more than that share of it is learned, from the strong view or,
    by chance, from the weak one, and S has it; of all other items the set is learned, from the weak view, and in the
    last part of the run it counts less. Nothing of it happens before."""
    S = random_sets(40, 4, torch.Generator().manual_seed(0))
    one_view: dict[str, Any] = dict(one_view="weak", vote="sets", learn="sets")
    method = blob_method(
        URRL,
        S,
        URRLConfig(
            alpha=0.0, phi=0.5, voting=0.125, sure=0.9, sure_from=0.25, sure_strong=sure_strong, fade=fade, **one_view
        ),
    ).eval()
    rng = torch.Generator().manual_seed(1)
    q = unit_rows(40, method.net.embed_dim, rng)
    method.total_epochs = 16
    firm = 5 * torch.randn(40, 4, generator=rng)
    said, turns = [], []
    for epoch in range(11):
        logits = firm + torch.randn(40, 4, generator=rng)
        said.append([reference.softmax(row.tolist()) for row in logits])

        def look(turn=0, logits=logits):
            turns.append(turn)
            return Out(logits, q, q)

        figures = method.begin_epoch(epoch, look)
        assert method.views == (("weak", "strong") if epoch >= 4 else ("weak",))
        assert (figures.get("sure", 0) > 0) == (epoch >= 4)
    assert turns == [0, 0, 0, 0, 1, 2]  # while labels may be sure, each time another look
    own = log_given(S, method.mu).exp()
    views = {"weak": torch.randn(40, *method.shape), "strong": torch.randn(40, *method.shape)}
    outs = {name: method.net(x).logits for name, x in views.items()}
    torch.manual_seed(2)
    coins = (torch.rand(40) < sure_strong).tolist()
    counts = {0.0: 1.0, 0.25: 1.0, 0.4: 6 / 6.4, 0.5: 6 / 8}[fade]  # six of sixteen epochs are left
    wanted, sure, added = [], [], 0
    for i in range(40):
        opinion = [0.25 * said[4][i][c] + 0.5 * said[7][i][c] + said[10][i][c] for c in range(4)]
        p = [opinion[c] * float(own[i, c]) for c in range(4)]
        p = [v / sum(p) for v in p]
        label = p.index(max(p))
        sure.append(p[label] > 0.9)
        f = reference.softmax(outs["strong" if sure[-1] and coins[i] else "weak"][i].tolist())
        if sure[-1]:
            assert method.S[i, label] and method.known[i] == label
            added += not S[i, label]
            wanted.append(-math.log(f[label]))
        else:
            said_by_set = own[i] / own[i].sum()
            outside = [c for c in range(4) if not method.S[i, c]]
            shared = np.mean([float(said_by_set[c]) for c in outside]) if outside else 0.0
            likelihood = sum(f[c] * (shared if c in outside else float(said_by_set[c])) for c in range(4))
            wanted.append(-counts * math.log(likelihood))
    assert 5 < sum(sure) < 35 and added > 0
    assert (method.known >= 0).tolist() == sure and figures["sure"] == pytest.approx(sum(sure) / 40)
    torch.manual_seed(2)
    step = method.loss(Batch(torch.arange(40), views))
    assert step.terms["cr"].item() == pytest.approx(np.mean(wanted), rel=1e-4)


@pytest.mark.parametrize(("own_power", "prior"), [(0.5, 0.0), (1.0, 0.5), (0.0, 1.0)])
def test_what_a_scout_said(own_power, prior):
    """It tells in several looks at once; labels become sure by its opinion and so much of the own set, and stay as they
    are for a while; of the other items a power of its opinion is learned beside the whole set."""
    S = random_sets(40, 4, torch.Generator().manual_seed(0))
    options = URRLConfig(
        alpha=0.0, phi=0.5, voting=0.125, sure=0.8, sure_from=0.25, sure_own=own_power, sure_prior=prior,
        sure_again=0.7, one_view="weak", vote="sets", learn="sets",
    )  # fmt: skip
    method = blob_method(URRL, S, options).eval()
    method.total_epochs, method.scouted = 16, 4
    rng = torch.Generator().manual_seed(1)
    firm = 4 * torch.randn(40, 4, generator=rng)
    turns, said, wanted = [], [], []
    views = {"weak": torch.randn(40, *method.shape), "strong": torch.randn(40, *method.shape)}
    outs = {name: method.net(x).logits for name, x in views.items()}
    for epoch in range(16):
        if epoch == 5:
            first = method.known.clone()
            torch.manual_seed(2)
            step = method.loss(Batch(torch.arange(40), views))

        def look(turn=0, epoch=epoch):
            turns.append((epoch, turn))
            logits, q = firm + torch.randn(40, 4, generator=rng), unit_rows(40, method.net.embed_dim, rng)
            if epoch == 4:
                said.append([reference.softmax(row.tolist()) for row in logits])
            return Out(logits, q, q)

        method.begin_epoch(epoch, look)
        if epoch == 12:
            assert torch.equal(method.known, first)
    assert turns[-5:] == [(4, 0), (4, 1), (4, 2), (13, 3), (15, 3)]
    own = log_given(S, method.mu).exp()
    n_sure = 0
    for i in range(40):
        opinion = [0.25 * said[0][i][c] + 0.5 * said[1][i][c] + said[2][i][c] for c in range(4)]
        p = [opinion[c] * float(own[i, c]) ** own_power for c in range(4)]
        label = p.index(max(p))
        assert first[i] == (label if p[label] / sum(p) > 0.8 else UNSURE)
        n_sure += p[label] / sum(p) > 0.8
        f = reference.softmax(outs["strong" if first[i] >= 0 else "weak"][i].tolist())
        told = own[i] / own[i].sum()
        likelihood = sum(f[c] * float(told[c]) * (opinion[c] / sum(opinion)) ** prior for c in range(4))
        wanted.append(-math.log(f[label] if first[i] >= 0 else likelihood))
    assert 5 < n_sure < 35
    assert step.terms["cr"].item() == pytest.approx(np.mean(wanted), rel=1e-4)


def test_every_second_member_learns_sure_labels():
    """The others go on with the sets, which do not fade for them."""
    S = random_sets(12, 4, torch.Generator().manual_seed(0))
    options = URRLConfig(alpha=0.0, sure=0.9, fade=0.5, one_view="weak", vote="sets", learn="sets")
    logits = torch.randn(12, 4)
    for members, taught in ((1, [True]), (2, [False, True]), (3, [False, True, False])):
        method = blob_method(URRL, S, options)
        method.known.copy_(torch.arange(12) % 4)
        method.known[::3] = UNSURE
        method.heed.fill_(0.25)
        method.net.members = members
        rows = torch.randperm(12)
        kinds = [t for part, t in zip(rows.tensor_split(members), taught) for _ in part]
        found = method._taught(rows)
        assert found[~torch.tensor(kinds)].eq(UNTAUGHT).all()
        assert found[torch.tensor(kinds)].tolist() == [
            UNSURE if row % 3 == 0 else row % 4 for row, t in zip(rows.tolist(), kinds) if t
        ]
        whole = method._misfit(logits, [(torch.ones(()), rows)], None, soft_cross_entropy)
        misfit = method._misfit(logits, [(torch.ones(()), rows)], found, soft_cross_entropy)
        factor = torch.tensor([0.25 if t else 1.0 for t in kinds])
        torch.testing.assert_close(misfit[found < 0], (factor * whole)[found < 0])


def test_sure_is_refused_where_it_has_no_meaning():
    with pytest.raises(UserError, match="sure takes one_view"):
        URRLConfig(sure=0.9)
    with pytest.raises(UserError, match="sure takes one_view"):
        URRLConfig(sure=0.9, one_view="weak", vote="sets", learn="labels", alpha=0.0)
    with pytest.raises(UserError, match="alpha=0"):
        URRLConfig(sure=0.9, one_view="weak", vote="sets", learn="sets", alpha=1.0)


def test_labels_follow_the_sets_votes():
    """l is network x vote (1e-8 at least) x likelihood of the item's own set, renormalised on S; sure labels enter S;
    the sets that vote are those that were given, not the corrected ones."""
    S = generate(torch.arange(300) % 3, 3, 0.3, 0.3, seed=2).mask
    method = blob_method(URRL, S, URRLConfig(vote="sets", phi=0.6, k=20))
    q = unit_rows(3, method.net.embed_dim, torch.Generator().manual_seed(1)).repeat(100, 1)  # three tight clusters
    q = torch.nn.functional.normalize(q + 0.001 * torch.randn(q.shape), dim=1)
    logits = torch.zeros(300, 3)
    figures = method.begin_epoch(1, lambda: Out(logits, q, q))
    z = torch.nn.functional.normalize(principal_components(q, 128, whiten=True), dim=1)
    held = ballot(z, S, 20)
    vote, mu = held.on(torch.arange(300)), held.mu
    assert method.mu.item() == pytest.approx(mu)
    posterior = [
        [math.sqrt(max(1e-8, vote[i, c].item()) / 3) * math.exp(log_given(S, mu)[i, c].item()) for c in range(3)]
        for i in range(300)
    ]
    for i, row in enumerate(posterior):
        share = [v / sum(row) for v in row]
        best = share.index(max(share))
        grown = {c for c in range(3) if S[i, c]} | ({best} if share[best] > 0.6 else set())
        assert grown == {c for c in range(3) if method.S[i, c]}
        expected = [share[c] / sum(share[k] for k in grown) if c in grown else 0.0 for c in range(3)]
        np.testing.assert_allclose(method.l[i].numpy(), expected, atol=1e-4)
    assert figures["corrected_now"] == int((method.S & ~S).sum()) > 5
    assert ((method.added == 1) == (method.S & ~S)).all()
    method.begin_epoch(2, lambda: Out(logits, q, q))  # mu is estimated once
    assert method.mu.item() == pytest.approx(mu)
    second = method.l.clone()
    method.begin_epoch(3, lambda: Out(logits, q, q))  # the same network and sets: the same labels
    torch.testing.assert_close(method.l, second)
    assert (method.l.argmax(1) == torch.arange(300) % 3).double().mean() > 0.95


def test_a_start_by_vote_is_kept_through_the_first_epoch():
    y = torch.arange(300) % 3
    S = generate(y, 3, 0.3, 0.3, seed=2).mask
    method = blob_method(URRL, S, URRLConfig(start="vote", vote="sets", phi=0.6, k=20))
    centres = 5 * unit_rows(3, 12, torch.Generator().manual_seed(0))
    method.prepare(centres[y] + torch.randn(300, 12, generator=torch.Generator().manual_seed(1)))
    started = method.l.clone()
    assert (started.argmax(1) == y).double().mean() > 0.9
    q = unit_rows(300, 16, torch.Generator().manual_seed(1))
    random = Out(torch.randn(300, 3), q, q)
    method.begin_epoch(0, lambda: random)  # an untrained network has nothing to say
    assert torch.equal(method.l, started)
    method.begin_epoch(1, lambda: random)
    assert not torch.equal(method.l, started)


def test_one_view_without_a_loss_is_refused():
    with pytest.raises(UserError, match="one_view"):
        URRLConfig(one_view="weak", use_m=False, use_cr=False)
    S = random_sets(8, 3, torch.Generator().manual_seed(0))
    without = [URRLConfig(one_view="weak", vote="sets", use_m=m, use_cr=not m) for m in (False, True)]
    for config in without:
        method = blob_method(URRL, S, config)
        step = method.loss(Batch(torch.arange(8), {"weak": torch.randn(8, *method.shape)}))
        assert torch.isfinite(step.total) and len(step.terms) == 1


def test_class_thresholds_by_hand():
    p = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.99, 0.01, 0.0], [0.1, 0.4, 0.3], [0.0, 0.0, 1.0]])
    S = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0]]).bool()
    # class 0: of rows 0 and 1, which have it (row 2 has not); class 1: row 3, too unsure; class 2: of no row
    torch.testing.assert_close(class_thresholds(p, S), torch.tensor([0.8 - 0.1, 0.5, 0.5]))


def test_a_threshold_for_each_class():
    rng = torch.Generator().manual_seed(0)
    S = random_sets(60, 4, rng)
    f, q, l = torch.rand(60, 4, generator=rng).softmax(1), unit_rows(60, 5, rng), distribution_on(S, rng)
    phi = torch.tensor([0.2, 0.3, 0.9, 0.25])
    rows, labels, _ = corrections(f, q, l, S, 5, 0.3, phi)
    everything = corrections(f, q, l, S, 5, 0.3, 0.0)
    wanted = {(r, c) for r, c, s in zip(*(t.tolist() for t in everything)) if s > phi[c]}
    assert set(zip(rows.tolist(), labels.tolist())) == wanted and wanted and 2 not in labels.tolist()


def test_one_view_cannot_make_labels_of_two():
    with pytest.raises(UserError, match="one_view takes vote=sets"):
        URRL.Config(one_view="weak", vote="labels")
