"""The compared methods agree with the literal loops of their papers, over random states; and where two must agree."""

import dataclasses
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import reference, reference_baselines
from tests.runs import PAPER, assert_same, call, outcome, unfinished
from tests.tools import as_sets, blob_method, distribution_on, random_sets, unit_rows
from urrl.config import RECIPES, Training, build, resolve
from urrl.errors import UserError
from urrl.functional import mixup
from urrl.likelihood import set_nll
from urrl.methods import METHODS, Batch
from urrl.methods.alim import ALIM, missing_rate, quantile
from urrl.methods.cc import CC
from urrl.methods.cr_dpll import CRDPLL, CRDPLLConfig
from urrl.methods.irnet import IRNet, outsiders
from urrl.methods.pico import ExpSum, PiCO, PiCOConfig, attract_label, moved
from urrl.methods.pico_plus import PiCOPlus, PiCOPlusConfig
from urrl.methods.proden import PRODEN
from urrl.methods.rabs import RABS, RABSConfig, candidate_losses
from urrl.methods.rc import RC

SEEDS = range(4)
N, C, D = 14, 6, 16  # D: the embedding of tests.tools.blob_method


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def state(kind, seed, config=None, S=None):
    """A method in eval mode (no batch statistics) with random l, and a batch of all its items."""
    rng = seeded(seed)
    S = random_sets(N, C, rng) if S is None else S
    method = blob_method(kind, S, config, seed=seed).eval()
    method.l.copy_(distribution_on(S, rng))
    x = torch.randn(len(S), *method.shape, generator=rng)
    views = {view: x + 0.3 * torch.randn(x.shape, generator=rng) for view in kind.views}
    return method, Batch(torch.arange(len(S)), views)


def softmaxes(logits):
    return [reference.softmax(row) for row in logits.detach().double().tolist()]


def outputs(method, batch):
    return {view: softmaxes(method.net(x).logits) for view, x in batch.views.items()}


# ---- one loss, no memory but l -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [PRODEN, RC])
def test_proden_and_rc_loss(kind, seed):
    method, batch = state(kind, seed)
    f = outputs(method, batch)
    slow = [reference_baselines.cross_entropy(f[v][i], method.l[i].tolist()) for v in f for i in range(N)]
    assert method.loss(batch).total.item() == pytest.approx(np.mean(slow), rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [PRODEN, RC])
def test_proden_weighs_by_the_step_and_rc_by_the_network_it_made(kind, seed):
    method, batch = state(kind, seed)
    before = outputs(method, batch)
    step = method.loss(batch)
    step.total.backward()
    torch.optim.SGD(method.net.parameters(), 1.0).step()
    after = outputs(method, batch)
    method.refine(batch, step)
    f = before if kind is PRODEN else after
    for i, s in enumerate(as_sets(method.S)):  # the geometric mean of the views
        both = [math.sqrt(f["weak"][i][c] * f["strong"][i][c]) for c in range(C)]
        np.testing.assert_allclose(method.l[i].numpy(), reference_baselines.renormalised(both, s), atol=1e-5)
    other = after if kind is PRODEN else before
    assert max(np.abs(np.array(f["weak"]) - np.array(other["weak"])).ravel()) > 1e-2  # the two differ


@pytest.mark.parametrize("seed", SEEDS)
def test_cc_loss(seed):
    method, batch = state(CC, seed)
    f, sets = outputs(method, batch), as_sets(method.S)
    slow = [reference_baselines.cc(f[v][i], sets[i]) for v in f for i in range(N)]
    assert method.loss(batch).total.item() == pytest.approx(np.mean(slow), rel=1e-5)


def test_cc_is_finite_and_right_for_extreme_logits():
    logits = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    loss = set_nll(logits, torch.tensor([[False, True, True]]), mu=0.0)
    assert loss.item() == pytest.approx(300)
    loss.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", ["mae", "gce", "sce", "mse"])
def test_rabs_loss(loss, seed):
    method, batch = state(RABS, seed, RABSConfig(loss=loss))
    f, sets = outputs(method, batch), as_sets(method.S)
    slow = [reference_baselines.rabs(f[v][i], sets[i], loss) for v in f for i in range(N)]
    assert method.loss(batch).total.item() == pytest.approx(np.mean(slow), rel=1e-5)


def test_rabs_is_not_the_distance_to_the_uniform_vector():
    """Any candidate alone is as good as all of them alike (MAE); the distance would be 0 for the one, not the other."""
    S = torch.tensor([[True, True, False, False]])
    share = S.float() / 2
    sure, torn = torch.tensor([[60.0, 0, 0, 0]]), torch.tensor([[60.0, 60, 0, 0]])
    losses = [(share * candidate_losses(logits, RABSConfig())).sum().item() for logits in (sure, torn)]
    assert losses == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("loss, worst", [("mae", 2), ("mse", 2), ("gce", 1 / 0.7)])
def test_rabs_losses_are_bounded(loss, worst):
    """Zero for a sure and right network; never above the bound, however wrong it is."""
    values = candidate_losses(torch.tensor([[200.0, -200.0]]), RABSConfig(loss=loss))[0]
    assert values.tolist() == pytest.approx([0, worst], abs=1e-5)


# ---- where methods must agree -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_singleton_sets_make_cross_entropy_of_them_all(seed):
    y = torch.randint(0, C, (N,), generator=seeded(seed))
    S = F.one_hot(y, C).bool()
    for kind in (PRODEN, RC, CC):
        method, batch = state(kind, seed, S=S)
        logits = [method.net(x).logits for x in batch.views.values()]
        plain = torch.stack([F.cross_entropy(z, y) for z in logits]).mean()
        assert method.loss(batch).total.item() == pytest.approx(plain.item(), rel=1e-5)


def test_full_sets_teach_nothing():
    S = torch.ones(N, C, dtype=torch.bool)
    method, batch = state(CC, 0, S=S)
    assert method.loss(batch).total.item() == 0
    method, batch = state(CRDPLL, 0, S=S)
    method.begin_epoch(0, None)
    assert method.loss(batch).total.item() == 0  # and the consistency has not begun


def test_gce_runs_from_cross_entropy_to_half_of_mae():
    logits = torch.randn(5, 4, generator=seeded(0))
    gce = candidate_losses(logits, RABSConfig(loss="gce", gce_q=1.0))
    torch.testing.assert_close(gce, candidate_losses(logits, RABSConfig()) / 2)
    near = candidate_losses(logits, RABSConfig(loss="gce", gce_q=0.01))
    torch.testing.assert_close(near, -F.log_softmax(logits, 1), rtol=0.05, atol=0.01)


# ---- CR-DPLL ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("epoch, weight", [(0, 0.0), (2, 0.5), (4, 1.0), (9, 1.0)])
def test_cr_dpll_loss_and_labels(seed, epoch, weight):
    method, batch = state(CRDPLL, seed, CRDPLLConfig(ramp=0.4))
    method.total_epochs = 10
    method.begin_epoch(epoch, None)
    f, sets = outputs(method, batch), as_sets(method.S)
    fs = [[f[view][i] for view in ("weak", "strong", "strong2")] for i in range(N)]
    l = method.l.double().numpy()
    step = method.loss(batch)
    slow = [reference_baselines.cr_dpll(fs[i], sets[i], l[i], weight) for i in range(N)]
    assert step.total.item() == pytest.approx(np.mean(slow), rel=1e-4)
    method.refine(batch, step)
    slow = [reference_baselines.cr_dpll_labels(fs[i], sets[i]) for i in range(N)]
    np.testing.assert_allclose(method.l.numpy(), slow, atol=1e-5)


# ---- PiCO ---------------------------------------------------------------------------------------------------


def pico_state(kind, seed, config=None, epoch=5):
    """In the middle of a run of ten epochs, with a full queue and real prototypes."""
    method, batch = state(kind, seed, config)
    rng = seeded(seed + 100)
    method.total_epochs = 10
    method.z.copy_(unit_rows(C, D, rng))
    method.queue_label.copy_(torch.randint(0, C, method.queue_label.shape, generator=rng))
    for p in method.key.parameters():  # another network than the one that learns
        p.add_(0.1 * torch.randn(p.shape, generator=rng))
    method.begin_epoch(epoch, None)
    return method, batch


def double(*tensors):
    return [t.detach().double().numpy() for t in tensors]


def embeddings(method, batch):
    out, key = method.net(batch.views["weak"]), method.key(batch.views["strong"])
    q, k, queue, z, l = double(out.q, key.q, method.queue, method.z, method.l)
    f = softmaxes(out.logits)
    return f, q, k, queue, z, l


@pytest.mark.parametrize("seed", SEEDS)
def test_pico_loss(seed):
    method, batch = pico_state(PiCO, seed)
    f, q, k, queue, z, l = embeddings(method, batch)
    sets = as_sets(method.S)
    labels = [reference_baselines.argmax(f[i], sorted(sets[i])) for i in range(N)]
    phi = 0.95 + 0.5 * (0.8 - 0.95)  # half of the run is over
    targets = [reference_baselines.pico_target(l[i], q[i], z, sets[i], phi) for i in range(N)]
    step = method.loss(batch)
    cls = np.mean([reference_baselines.cross_entropy(f[i], targets[i]) for i in range(N)])
    queue_labels = method.queue_label.tolist()
    cont = np.mean([reference_baselines.supcon(i, q, k, labels, queue, queue_labels, 0.07) for i in range(N)])
    assert step.terms["cls"].item() == pytest.approx(cls, rel=1e-4)
    assert step.terms["cont"].item() == pytest.approx(cont, rel=1e-4)
    assert step.total.item() == pytest.approx(cls + 0.5 * cont, rel=1e-4)
    method.refine(batch, step)
    np.testing.assert_allclose(method.l.numpy(), targets, atol=1e-6)
    np.testing.assert_allclose(method.z.numpy(), reference_baselines.move_prototypes(z, q, labels, 0.99), atol=1e-5)
    np.testing.assert_allclose(method.queue.numpy(), k, atol=1e-6)  # as long as the batch
    assert method.queue_label.tolist() == labels


@pytest.mark.parametrize("seed", SEEDS)
def test_pico_warm_up(seed):
    method, batch = pico_state(PiCO, seed, PiCOConfig(warm=0.3), epoch=2)
    f, q, k, queue, _, l = embeddings(method, batch)
    step = method.loss(batch)
    cls = np.mean([reference_baselines.cross_entropy(f[i], l[i]) for i in range(N)])
    cont = np.mean([reference_baselines.moco(q[i], k[i], queue, 0.07) for i in range(N)])
    assert step.total.item() == pytest.approx(cls + 0.5 * cont, rel=1e-4)
    method.refine(batch, step)
    np.testing.assert_allclose(method.l.numpy(), l, atol=1e-7)  # rests


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
def test_prototypes_move_as_if_one_item_came_after_the_other(seed, decay):
    rng = seeded(seed)
    z, q = unit_rows(C, D, rng), unit_rows(40, D, rng)
    z[1] = 0  # never seen before
    label = torch.randint(0, C - 1, (40,), generator=rng)  # the last class is not in the batch
    z64, q64 = double(z, q)
    slow = reference_baselines.move_prototypes(z64, q64, label.tolist(), decay)
    np.testing.assert_allclose(moved(z, q, label, decay).numpy(), slow, atol=1e-5)


def test_no_item_at_all_leaves_the_prototypes_alone():
    z = unit_rows(C, D, seeded(0))
    torch.testing.assert_close(moved(z, torch.empty(0, D), torch.empty(0, dtype=torch.long), 0.9), z)


def test_one_positive_in_a_queue_of_opposites():
    """q . k = 1 for the positive and -1 for n others: log(1 + n exp(-2 / tau))."""
    q = torch.tensor([[1.0, 0.0]])
    rest = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    loss = attract_label(q, torch.tensor([1]), rest, torch.tensor([1, 0, 2, -1]), 3, 0.5)
    assert loss.item() == pytest.approx(math.log(1 + 3 * math.exp(-2 / 0.5)), rel=1e-4)


def test_keys_of_no_label_are_negatives_for_everyone():
    rng = seeded(0)
    q, k, queue = unit_rows(5, D, rng), unit_rows(5, D, rng), unit_rows(9, D, rng)
    label = torch.tensor([0, 1, 0, 2, 1])
    rest_label = torch.cat([label, torch.full((9,), -1)])
    fast = attract_label(q, label, torch.cat([k, queue]), rest_label, C, 0.07)
    q64, k64, queue64 = double(q, k, queue)
    slow = [reference_baselines.supcon(i, q64, k64, label.tolist(), queue64, [-1] * 9, 0.07) for i in range(5)]
    np.testing.assert_allclose(fast.numpy(), slow, rtol=1e-4)


def test_the_queue_is_a_ring_of_the_newest_keys():
    S = random_sets(10, C, seeded(0))
    method = blob_method(PiCO, S, PiCOConfig(queue=7))
    assert len(blob_method(PiCO, S).queue) == 10  # no longer than there are items
    seen = []
    for step, size in enumerate([3, 3, 3, 2, 9, 1]):
        keys = torch.full((size, D), float(step)) + torch.arange(size)[:, None] / 100
        method.enqueue(keys, torch.full((size,), step))
        seen += keys[:, 0].tolist()
        last = seen[-7:]
        held = [v for v, label in zip(method.queue[:, 0].tolist(), method.queue_label.tolist()) if label >= 0]
        assert sorted(held) == pytest.approx(sorted(last))


def test_the_key_encoder_follows_and_gets_no_gradient():
    method, batch = pico_state(PiCO, 0, PiCOConfig(key_decay=0.9))
    method.steps.fill_(10_000)  # past the first steps, which follow faster
    old = [p.clone() for p in method.key.parameters()]
    step = method.loss(batch)
    step.total.backward()
    assert all(p.grad is None for p in method.key.parameters())
    method.refine(batch, step)
    for was, key, net in zip(old, method.key.parameters(), method.net.parameters()):
        torch.testing.assert_close(key, 0.9 * was + 0.1 * net.detach())


# ---- PiCO+ --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("knn", [0.125, 1.0])  # neighbours attract, or not yet
def test_pico_plus_loss(seed, knn):
    c = PiCOPlusConfig(neighbours=3, knn=knn)
    method, batch = pico_state(PiCOPlus, seed, c)
    rng = seeded(seed + 200)
    method.reliable.copy_(torch.rand(N, generator=rng) < 0.6)
    method.queue_reliable.copy_(torch.rand(len(method.queue), generator=rng) < 0.6)
    f, q, k, queue, z, l = embeddings(method, batch)
    sets, rel = as_sets(method.S), method.reliable.tolist()
    surest = [reference_baselines.argmax(f[i], sorted(sets[i])) for i in range(N)]
    labels = [surest[i] if rel[i] else int(np.argmax(f[i])) for i in range(N)]
    phi = 0.95 + 0.5 * (0.8 - 0.95)
    inside = [reference_baselines.pico_target(l[i], q[i], z, sets[i], phi) for i in range(N)]
    guess = [reference.softmax([reference.dot(q[i], z_c) / 0.07 for z_c in z]) for i in range(N)]
    targets = [inside[i] if rel[i] else guess[i] for i in range(N)]
    fit = [reference_baselines.cross_entropy(f[i], targets[i]) for i in range(N)]

    all_labels = [*labels, *labels, *method.queue_label.tolist()]
    all_reliable = [*rel, *rel, *method.queue_reliable.tolist()]
    cont, cont_all = [], []
    for i in range(N):
        by_label = [a for a in range(len(all_labels)) if all_labels[a] == labels[i]]
        if rel[i]:
            positives = [a for a in by_label if all_reliable[a]]
        else:
            positives = reference_baselines.nearest_places(i, q, k, queue, 3) if knn < 0.5 else []
        positives = sorted({*positives, N + i})  # the item's own key
        arguments = (i, q, k, labels, queue, method.queue_label.tolist(), 0.07)
        cont.append((0.5 if rel[i] else 0.1) * reference_baselines.supcon(*arguments, positives))
        cont_all.append(reference_baselines.supcon(*arguments, by_label))

    torch.manual_seed(seed)
    step = method.loss(batch)
    torch.manual_seed(seed)
    mixed, mixed_target = mixup(batch.views["weak"], torch.tensor(np.array(targets)), 4.0)
    f_mixed = softmaxes(method.net(mixed).logits)
    mix = np.mean([reference_baselines.cross_entropy(f_mixed[i], mixed_target[i].tolist()) for i in range(N)])
    slow = {
        "mix": mix,
        "cls": np.mean([fit[i] for i in range(N) if rel[i]]),
        "cls_other": np.mean([fit[i] for i in range(N) if not rel[i]]),
        "cont": np.mean(cont),
        "cont_all": np.mean(cont_all),
    }
    for name, value in slow.items():
        assert step.terms[name].item() == pytest.approx(value, rel=2e-4), name
    total = mix + 2 * slow["cls"] + slow["cont"] + 0.1 * (slow["cls_other"] + slow["cont_all"])
    assert step.total.item() == pytest.approx(total, rel=2e-4)

    method.refine(batch, step)
    np.testing.assert_allclose(method.l.numpy(), inside, atol=1e-6)
    chosen = [i for i in range(N) if rel[i]]
    slow_z = reference_baselines.move_prototypes(z, q[chosen], [labels[i] for i in chosen], 0.99)
    np.testing.assert_allclose(method.z.numpy(), slow_z, atol=1e-5)
    far = [1 - reference.dot(q[i], z[surest[i]]) for i in range(N)]
    np.testing.assert_allclose(method.distance.numpy(), far, atol=1e-5)
    assert method.queue_reliable.tolist() == rel
    method.begin_epoch(6, None)
    assert {i for i in range(N) if method.reliable[i]} == reference_baselines.pico_plus_reliable(far, 0.6)


@pytest.mark.parametrize("reliable", [True, False])
def test_pico_plus_with_items_of_one_kind_only(reliable):
    method, batch = pico_state(PiCOPlus, 0)
    method.reliable.fill_(reliable)
    step = method.loss(batch)
    assert torch.isfinite(step.total)
    assert step.terms["cls_other" if reliable else "cls"].item() == 0
    method.refine(batch, step)


# ---- ALIM ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_alim_target_and_loss(seed, lam):
    method, batch = pico_state(ALIM, seed)
    method.w.copy_(torch.randn(N, C, generator=seeded(seed)).softmax(1))  # mass outside S, too
    method.log_lambda.fill_(math.log(lam) if lam else -math.inf)
    f, q, k, queue, z, _ = embeddings(method, batch)
    sets = as_sets(method.S)
    (w,) = double(method.w)
    phi = 0.95 + 0.5 * (0.8 - 0.95)
    targets = [reference_baselines.alim_target(w[i], q[i], z, sets[i], phi, lam, 0.07) for i in range(N)]
    trusted = [[f[i][c] * (1.0 if c in sets[i] else lam) for c in range(C)] for i in range(N)]
    labels = [int(np.argmax(row)) for row in trusted]
    torch.manual_seed(seed)
    step = method.loss(batch)
    cls = np.mean([reference_baselines.cross_entropy(f[i], targets[i]) for i in range(N)])
    queue_labels = method.queue_label.tolist()
    cont = np.mean([reference_baselines.supcon(i, q, k, labels, queue, queue_labels, 0.07) for i in range(N)])
    torch.manual_seed(seed)
    mixed, mixed_target = mixup(batch.views["weak"], torch.tensor(np.array(targets)), 4.0)
    f_mixed = softmaxes(method.net(mixed).logits)
    mix = np.mean([reference_baselines.cross_entropy(f_mixed[i], mixed_target[i].tolist()) for i in range(N)])
    assert step.total.item() == pytest.approx(cls + 0.5 * cont + mix, rel=2e-4)
    method.refine(batch, step)
    np.testing.assert_allclose(method.w.numpy(), targets, atol=1e-6)
    for i, s in enumerate(sets):
        np.testing.assert_allclose(method.l[i].numpy(), reference_baselines.renormalised(targets[i], s), atol=1e-5)
    slow = [reference_baselines.alim_ratio(q[i], z, sets[i], 0.07) for i in range(N)]
    np.testing.assert_allclose(method.log_ratio.exp().numpy(), slow, rtol=1e-3)


def test_alim_noise_is_what_the_surer_half_says():
    sureness = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.1, 0.0])
    log_ratio = torch.tensor([-1.0, 2.0, 3.0, 4.0, -5.0, -6.0, -7.0, -8.0])
    assert missing_rate(log_ratio, sureness) == 0.25
    assert quantile(log_ratio, 0.25).item() == -6.0  # two of eight lie below
    assert quantile(log_ratio, 1.0).item() == 4.0


def test_alim_lambda_begins_at_zero_and_never_exceeds_one():
    method, _ = pico_state(ALIM, 0, epoch=0)
    assert method.log_lambda.item() == -math.inf
    method.log_ratio.fill_(3.0)
    assert method.begin_epoch(5, None) == {"noise_estimate": 0.0, "lambda": 0.0}  # no set is wrong: S alone counts
    method.log_ratio.copy_(torch.linspace(-4, 4, N))
    method.sureness.copy_(torch.linspace(0, 1, N))
    method.log_ratio[-1] = -1.0  # one of the surer half, 7 items, points outside
    figures = method.begin_epoch(6, None)
    assert figures["noise_estimate"] == pytest.approx(1 / 7) and 0 < figures["lambda"] < 1
    method.log_ratio[N // 2 :] = -5.0
    method.log_ratio[: N // 2] = 5.0
    assert method.begin_epoch(7, None)["lambda"] == 1.0


def test_alim_with_lambda_zero_is_pico_with_mixup():
    pico, batch = pico_state(PiCO, 3)
    alim, _ = pico_state(ALIM, 3)
    alim.w.copy_(alim.l)
    alim.log_lambda.fill_(-math.inf)
    for name in ("cls", "cont"):
        torch.testing.assert_close(alim.loss(batch).terms[name], pico.loss(batch).terms[name])


# ---- IRNet --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lead", [0.0, 0.02, 0.5])
def test_irnet_correction(seed, lead):
    rng = seeded(seed)
    n = 60
    z, q = unit_rows(C, D, rng), unit_rows(n, D, rng)
    q2 = F.normalize(q + 0.1 * torch.randn(n, D, generator=rng), dim=1)
    S = random_sets(n, C, rng)
    S[0] = True  # nothing is left to enter
    enters, label, p = outsiders((q @ z.T).softmax(1), (q2 @ z.T).softmax(1), S, lead)
    q64, second, z64 = double(q, q2, z)
    slow = [reference_baselines.irnet_correction(q64[i], second[i], z64, s, lead) for i, s in enumerate(as_sets(S))]
    assert enters.tolist() == [found is not None for found in slow]
    assert label.tolist() == [found[0] for found in slow if found]
    np.testing.assert_allclose(p.numpy(), [found[1] for found in slow if found], atol=1e-5)
    assert enters.sum() > 3 if lead == 0 else True
    assert not enters.any() if lead == 0.5 else True


def test_irnet_grows_sets_after_its_start_and_stamps_the_epoch():
    method, batch = pico_state(IRNet, 0, epoch=1)
    before = method.S.clone()
    outside = (~before).float().argmax(1)  # every item sits on the prototype of a class outside its set
    method.z.copy_(F.normalize(torch.eye(C, D), dim=1))

    def steered():
        step = method.loss(batch)
        for view in step.outs.keys() & {"weak", "weak2"}:
            step.outs[view] = step.outs[view]._replace(q=method.z[outside].clone())
        return step

    method.refine(batch, steered())
    assert torch.equal(method.S, before)
    method.begin_epoch(2, None)
    method.refine(batch, steered())
    entered = method.S & ~before
    assert entered.sum() == N and entered[torch.arange(N), outside].all()
    assert (method.added[entered] == 2).all() and (method.added[~entered] == -1).all()
    torch.testing.assert_close(method.l.sum(1), torch.ones(N))
    assert (method.l[torch.arange(N), outside] > 0).all()


# ---- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_option_is_also_an_option_of_the_training(name):
    """--set KEY would mean both."""
    own = {f.name for f in dataclasses.fields(METHODS[name].Config)}
    assert not own & {f.name for f in dataclasses.fields(Training)}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dataset", ["digits", "fmnist", "cifar10", "cifar100"])
def test_every_recipe_sets_what_exists(name, recipe, dataset):
    values = RECIPES[recipe](dataset, name)
    training = {f.name for f in dataclasses.fields(Training)}
    build(Training, {k: v for k, v in values.items() if k in training})
    build(METHODS[name].Config, {k: v for k, v in values.items() if k not in training})


@pytest.mark.parametrize(("dataset", "epochs", "scout"), [("fmnist", 100, 0), ("cifar10", 60, 24)])
def test_labels_become_sure_in_runs_that_have_time_for_it(dataset, epochs, scout):
    """The net at the end is as wide for all methods, and its epochs are as many."""
    cell: dict[str, Any] = dict(eta=0.3, mu=0.3, convention="paper", seed=0, split="paper", subset=None)
    for given, sure in (({}, 0.95), ({"epochs": 60}, 0.95), ({"epochs": 59}, 0.0)):
        run, other = (resolve(dataset, m, "fast", METHODS[m].Config, given, **cell) for m in ("urrl", "proden"))
        assert run.options.sure == sure and ((run.training.again or run.training.scout) > 0) == (sure > 0)
        assert run.training.scout == (scout if sure else 0) and other.training.scout == 0
        assert run.training.width == other.training.width
        assert run.training.epochs == other.training.epochs == given.get("epochs", epochs)


@pytest.mark.parametrize("name", ["pico", "irnet"])
def test_no_scout_for_who_keeps_a_copy_of_the_network(name):
    with pytest.raises(UserError, match=f"scout does not go with {name}"):
        resolve("digits", name, "fast", METHODS[name].Config, {"scout": 2}, eta=0.3, mu=0.3,
                convention="paper", seed=0, split="paper", subset=None)  # fmt: skip


def test_shares_of_a_run_are_whole_epochs():
    method = blob_method(PiCO, random_sets(4, 3, seeded(0)))
    method.total_epochs = 100
    assert [method.epochs_in(s) for s in (0.0, 0.07, 0.00125, 0.125, 1.0)] == [0, 7, 1, 13, 100]


# ---- whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*METHODS, "urrl, paper form"])  # more of it in tests/test_resume.py
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    """Stopped after the third of four epochs, when every phase of every method has begun."""
    tiny = "train --dataset digits --subset 120 --epochs 4 --set width=2 --set batch_size=40 --threads 1 --quiet"
    method, _, paper = name.partition(", ")
    arguments = [*tiny.split(), "--method", method, "--eta", 0.3, "--mu", 0.3, *(PAPER if paper else [])]
    assert call(*arguments, "--out", tmp_path / "whole").code == 0
    stopped = unfinished(tmp_path / "whole", tmp_path / "stopped")
    shutil.move(stopped / "previous.ckpt", stopped / "last.ckpt")
    assert call(*arguments, "--out", stopped, "--resume").code == 0
    whole, resumed = outcome(tmp_path / "whole"), outcome(stopped)
    assert [record["epoch"] for record in resumed["metrics"]] == [0, 1, 2, 3]
    assert_same(whole | {"files": None}, resumed | {"files": None})


def test_gradient_of_the_sum_over_keys():
    rng = torch.Generator().manual_seed(0)
    q, keys = unit_rows(5, 8, rng).requires_grad_(), unit_rows(40, 8, rng)
    (slow,) = torch.autograd.grad(((q @ keys.T / 0.1).exp().sum(1).log() * torch.arange(5)).sum(), q)
    (fast,) = torch.autograd.grad((ExpSum.apply(q, keys, 0.1).log() * torch.arange(5)).sum(), q)
    torch.testing.assert_close(fast, slow)
    with torch.autocast("cpu", torch.bfloat16):
        half = ExpSum.apply(q, keys, 0.1)
    torch.testing.assert_close(half, ExpSum.apply(q, keys, 0.1))
