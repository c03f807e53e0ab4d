"""Numbers at their limits: whatever a network puts out, everything stays finite, l stays a distribution on S and S only
grows."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tools import blob_method, distribution_on, random_sets, unit_rows
from urrl import labels
from urrl.candidates import generate
from urrl.evaluate import set_scores
from urrl.functional import (
    complement_nll,
    kl_to,
    log_one_minus_softmax,
    mixup,
    renormalise_on,
    soft_cross_entropy,
    softmax_on,
    uniform_on,
)
from urrl.knn import cosine_topk
from urrl.likelihood import estimate_mu, log_given, set_gain, set_log_likelihood, set_nll
from urrl.methods import METHODS, Batch
from urrl.methods.base import Step
from urrl.methods.pico import attract_label, moved
from urrl.methods.urrl import URRL, URRLConfig, class_thresholds, corrections, prototypes
from urrl.nets import Out
from urrl.noise import estimate_noise, noise_by_vote
from urrl.theory import em_figures
from urrl.warmstart import ballot, principal_components, raw_features

N = 12
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def logits_of(kind, n, C, seed=0):
    rng = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (n, C), generator=rng) * 2.0 - 1
    return {
        "1e4": 1e4 * sign,
        "1e30": 1e30 * sign,
        "one 1e30": 1e30 * F.one_hot(torch.arange(n) % C, C),
        "equal": torch.full((n, C), -7.0),
        "equal 1e30": torch.full((n, C), 1e30),
        "tiny": 1e-30 * sign,
        "usual": 3 * torch.randn(n, C, generator=rng),
    }[kind]


def as_type(logits, dtype):
    """Half precision ends at 65,504."""
    return logits.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def sets_of(kind, n, C):
    y = torch.arange(n) % C
    if kind == "one":
        return F.one_hot(y, C).bool()
    if kind == "all wrong":
        return generate(y, C, 0.3, 1.0, "fredis" if C > 2 else "paper", seed=1).mask
    return torch.ones(n, C, dtype=torch.bool) if kind == "full" else random_sets(n, C, torch.Generator().manual_seed(1))


LOGITS = ("1e4", "1e30", "one 1e30", "equal", "equal 1e30", "tiny", "usual")
SETS = ("one", "full", "all wrong", "random")


@pytest.fixture(params=[2, 10, 1000], ids="C={}".format)
def C(request):
    return request.param


@pytest.fixture(params=SETS)
def S(request, C):
    return sets_of(request.param, N, C)


def assert_on(S, l):
    """l is a distribution on S."""
    assert torch.isfinite(l).all() and (l >= 0).all() and (l[~S] == 0).all()
    torch.testing.assert_close(l.float().sum(1), torch.ones(len(l)), atol=1e-5, rtol=0)


# ---- the algebra -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGITS)
def test_losses_and_their_gradients(C, S, kind, count):
    target = distribution_on(S, torch.Generator().manual_seed(2))
    losses = {
        "complement": lambda x: complement_nll(x, S),
        "cross-entropy": lambda x: soft_cross_entropy(x, target),
        "cross-entropy of a label": lambda x: soft_cross_entropy(x, F.one_hot(S.int().argmax(1), x.shape[1])),
        "KL": lambda x: kl_to(x, target),
        "CC": lambda x: set_nll(x, S, 0.0),
        "set": lambda x: set_nll(x, S, 0.3),
    }
    for dtype in DTYPES:
        logits = as_type(logits_of(kind, N, C), dtype)
        for name, loss in losses.items():
            x = logits.clone().requires_grad_()
            value = loss(x)
            value.mean().backward()
            assert value.dtype == torch.float32 and torch.isfinite(value).all(), (name, dtype)
            assert torch.isfinite(x.grad).all(), (name, dtype)
            assert (value >= -1e-5 * value.abs().max().clamp_min(1)).all(), (name, dtype)
        assert (log_one_minus_softmax(logits) <= 0).all()
        count("numbers at their limits: losses", finite=len(losses), broken=0)


@pytest.mark.parametrize("kind", [*LOGITS, "-inf on S", "-inf", "inf"])
def test_distributions_on_sets(C, S, kind):
    for dtype in DTYPES:
        if kind == "-inf on S":  # of a mean over mirror images: log of what has underflown
            logits = torch.zeros(N, C, dtype=dtype).masked_fill(S, -torch.inf)
        elif kind in ("-inf", "inf"):
            logits = torch.full((N, C), float(kind), dtype=dtype)
        else:
            logits = logits_of(kind, N, C).to(dtype)
        assert_on(S, softmax_on(S, logits))
        f = logits.float().nan_to_num().softmax(1)
        assert_on(S, renormalise_on(S, f))
        assert_on(S, renormalise_on(S, f.to(dtype)))
    for scale in (0.0, 1e-45, 1e-42, 1e-38, 1e-30, 1.0):  # down to what is hardly a number
        assert_on(S, renormalise_on(S, scale * distribution_on(S, torch.Generator().manual_seed(3))))
    assert_on(S, uniform_on(S))


@pytest.mark.parametrize("alpha", [1e-3, 0.05, 1.0, 1e4, 1e30, 1e-300, 1e300])
def test_mixing(alpha):
    S = sets_of("random", N, 5)
    method = blob_method(URRL, S, URRLConfig(alpha=alpha))
    for seed in range(20):
        torch.manual_seed(seed)
        x, target = mixup(torch.ones(N, 3), uniform_on(S), alpha)
        assert_on(torch.ones_like(S), target)
        torch.testing.assert_close(x, torch.ones(N, 3))
        lam, partner = method._mixing(uniform_on(S))
        assert 0 <= float(lam) <= 1 and sorted(partner.tolist()) == list(range(N))


# ---- neighbours, prototypes, corrections -----------------------------------------------------------------


def embeddings(kind, n, d):
    q = unit_rows(n, d, torch.Generator().manual_seed(4))
    if kind == "zero":
        return torch.zeros(n, d)
    if kind == "some zero":
        q[::3] = 0
    if kind == "all alike":
        q = q[:1].repeat(n, 1)
    if kind == "opposite":
        q = torch.cat([q[: n // 2], -q[: n - n // 2]])
    return q


EMBEDDINGS = ("zero", "some zero", "all alike", "opposite", "usual")


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("n", [2, 3, 40])
def test_neighbours(kind, n):
    q = embeddings(kind, n, 5)
    for dtype in DTYPES:
        for k in (1, n - 1, n, 500):
            found = list(cosine_topk(q.to(dtype), k))
            rows, similarity, neighbour = (torch.cat(part) for part in zip(*found))
            assert similarity.shape == neighbour.shape == (n, min(k, n - 1))
            assert torch.isfinite(similarity).all() and (neighbour != rows[:, None]).all()
            assert ((neighbour >= 0) & (neighbour < n)).all()
            assert all(len(set(row)) == len(row) for row in neighbour.tolist())


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("logits", LOGITS)
def test_correction(C, kind, logits, count):
    S = sets_of(SETS[(LOGITS.index(logits) + EMBEDDINGS.index(kind)) % len(SETS)], N, C)
    q, l = embeddings(kind, N, 6), uniform_on(S)
    for dtype in DTYPES:
        f = as_type(logits_of(logits, N, C), dtype).softmax(1)
        z = prototypes(q, l)  # where there are more classes than items, most have no item
        assert torch.isfinite(z).all() and (z.norm(dim=1) < 1 + 1e-5).all()
        thresholds = class_thresholds(f, S)
        assert torch.isfinite(thresholds).all() and (thresholds >= 0.5).all()
        for phi in (0.0, 0.5, 1.0, thresholds):
            for k, tau in ((1, 1e-4), (N, 0.02), (10_000, 1e30)):
                rows, label, share = corrections(f, q, l, S, k, tau, phi)
                assert not S[rows, label].any() and len(set(rows.tolist())) == len(rows)
                assert torch.isfinite(share).all() and (share > 0).all() and (share < 1 + 1e-3).all()
        figures = em_figures(Out(logits_of(logits, N, C), q, q), S, l, z, 1e-4)
        assert all(math.isfinite(value) for value in figures.values())
    count("numbers at their limits: corrections", finite=36, broken=0)


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_contrast(kind):
    q = embeddings(kind, N, 6).requires_grad_()
    keys, label = embeddings("usual", 30, 6), torch.arange(N) % 3
    for tau in (0.02, 1.0, 1e30):
        loss = attract_label(q, label, torch.cat([q.detach(), keys]), torch.cat([label, torch.full((30,), -1)]), 5, tau)
        (gradient,) = torch.autograd.grad(loss.sum(), q)
        assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    for decay in (0.0, 0.99, 1.0):
        assert torch.isfinite(moved(torch.zeros(5, 6), q.detach(), label, decay)).all()


# ---- sets that vote, and what they say of the noise ------------------------------------------------------


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_votes(C, S, kind):
    q = embeddings(kind, N, 6)
    for mu in (None, 1e-3, 0.95):
        vote = ballot(q, S, mu=mu)
        p = vote.on(torch.arange(N))
        assert_on(torch.ones_like(S), p)
        assert 0 < vote.mu < 1 and torch.isfinite(vote.score(torch.arange(N))).all()


@pytest.mark.parametrize("logits", LOGITS)
def test_likelihoods(C, S, logits):
    f = logits_of(logits, N, C).softmax(1)
    mu = estimate_mu(f, S)
    assert 0 < mu < 1
    assert all(math.isfinite(score) for score in set_scores(f, S).values())
    for rate in (mu, 1e-3, 0.95):
        assert torch.isfinite(set_log_likelihood(f, S, rate)) and torch.isfinite(set_gain(S, rate)).all()
        assert_on(torch.ones_like(S), (f.clamp_min(1e-8).log() + log_given(S, rate)).softmax(1))
    for noise in [estimate_noise(f, S)] if int((~S.all(1)).sum()) > 1 else []:
        for low_to_high in noise[:3]:
            assert 0 <= low_to_high.low <= low_to_high.value <= low_to_high.high <= 1


X = {
    "zero": torch.zeros(20, 4),
    "all alike": torch.ones(20, 4) * 3.7,
    "two values": torch.arange(20.0)[:, None].remainder(2).expand(20, 4),
    "one column": torch.arange(20.0)[:, None],
    "one outlier": torch.cat([torch.zeros(19, 4), torch.full((1, 4), 1e4)]),
    "1e15": 1e15 * torch.randn(20, 4, generator=torch.Generator().manual_seed(0)),
    "1e-20": 1e-20 * torch.randn(20, 4, generator=torch.Generator().manual_seed(0)),
    "black images": torch.zeros(20, 1, 8, 8, dtype=torch.uint8),
    "white photographs": torch.full((20, 3, 12, 12), 255, dtype=torch.uint8),
    "noise": torch.randint(0, 256, (20, 3, 12, 12), generator=torch.Generator().manual_seed(0)).byte(),
}


@pytest.mark.parametrize("kind", X)
def test_raw_items(kind):
    x, S = X[kind], sets_of("random", 20, 5)
    for whiten in (False, True):
        assert torch.isfinite(principal_components(x, 128, whiten)).all()
    assert torch.isfinite(raw_features(x)).all()
    noise = noise_by_vote(x, S)
    assert noise is not None and all(math.isfinite(v) for estimate in noise[:3] for v in estimate)


# ---- the methods -----------------------------------------------------------------------------------------

FAST: dict[str, Any] = {"start": "vote", "vote": "sets", "one_view": "weak"}
KINDS: dict[str, dict[str, Any]] = {name: {} for name in METHODS} | {"urrl, fast": FAST, "urrl, adapt": {"adapt": True}}
LIMITS: dict[str, list[dict[str, Any]]] = {
    "urrl": [{"tau": 1e-4, "k": 1}, {"tau": 1e4, "k": 10_000, "phi": 0.0}, {"alpha": 1e-30, "phi": 1.0}],
    "urrl, fast": [{"tau": 1e-4, "k": 1}, {"adapt": True, "k": 10_000}, {"phi": 0.0, "w_m": 0.0}],
    "rabs": [{"loss": loss, "gce_q": 0.01} for loss in ("mae", "gce", "sce", "mse")],
    "pico": [{"tau": 0.02, "queue": 1, "key_decay": 0.0, "z_decay": 1.0}],
    "pico_plus": [{"tau": 0.02, "pure": 0.0, "select": 0.0, "knn": 0.0, "warm": 0.0}, {"pure": 1.0, "select": 0.0}],
    "alim": [{"tau": 0.02, "start": 0.0, "warm": 0.0, "alpha": 0.05}],
    "irnet": [{"tau": 0.02, "start": 0.0, "warm": 0.0, "threshold": 0.0}],
}  # of the options


def one_epoch(method, x, epoch, half=None, lr=1e-3):
    """As the loop does: the epoch's beginning, two steps, and after each the labels. Returns the losses."""
    method.total_epochs = 2
    method.train()

    def everything():
        method.net.eval()
        with torch.no_grad():
            out = method.net(x)
        method.net.train()
        return out

    figures = method.begin_epoch(epoch, everything)
    assert all(math.isfinite(value) for value in figures.values())
    losses = []
    for index in torch.arange(len(x)).tensor_split(2):
        batch = Batch(index, {view: x[index] for view in method.views})
        with torch.autocast("cpu", half, enabled=half is not None):
            step = method.loss(batch)
        method.net.zero_grad()
        step.total.backward()
        assert all(torch.isfinite(p.grad).all() for p in method.net.parameters() if p.grad is not None)
        with torch.no_grad():
            for p in method.net.parameters():
                if p.grad is not None:
                    p -= lr * p.grad / p.grad.norm().clamp_min(1)
        method.refine(batch, step)
        losses.append(step.total.item())
    return losses


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4], ids="logits x {:g}".format)
@pytest.mark.parametrize("kind", KINDS)
def test_every_method(kind, scale, count):
    for options in LIMITS.get(kind, [{}]):
        for C, sets in [(2, "one"), (4, "full"), (4, "all wrong"), (1000, "random")]:
            for half in (None, torch.bfloat16) if C == 4 else (None,):
                S = sets_of(sets, N, C)
                name = kind.partition(",")[0]
                config = METHODS[name].Config(**KINDS[kind] | options)
                method = blob_method(METHODS[name], S, config, d=4)
                x = torch.randn(N, 4).index_fill_(0, torch.tensor([1, 5]), 0.25)  # two items alike
                with torch.no_grad():
                    for layer in (method.net.classifier, method.net.embed):
                        layer.weight.mul_(scale)
                        layer.bias.mul_(scale)
                method.prepare(x)
                for epoch in range(2):
                    losses = one_epoch(method, x, epoch, half)
                    assert all(map(math.isfinite, losses)), (options, C, sets, half)
                    assert_on(method.S, method.l)
                    assert (method.S | ~S).all()
                    if hasattr(method, "added"):
                        assert torch.equal(method.S & ~S, method.added >= 0)
                count("numbers at their limits: methods", finite=1, broken=0)


# ---- a long time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("form", "short", "long"), [({}, 300, 10_000), ({"adapt": True}, 60, 3_000), (FAST, 12, 500)])
def test_drift(form, short, long, sparse, times, count, monkeypatch):
    """Outputs at random, of all sizes and precisions, for very many epochs."""
    n, C = 30, 25
    if sparse:
        monkeypatch.setattr(labels, "DENSE", 0)
    rng = torch.Generator().manual_seed(0)
    S = random_sets(n, C, rng)
    method = blob_method(URRL, S, URRLConfig(k=5, phi=0.6, **form), d=4)
    every = torch.arange(n)
    before = S
    grown = 0
    for epoch in range(times(short, long)):
        scale = 10.0 ** torch.randint(-2, 5, (), generator=rng).item()
        dtype = DTYPES[epoch % 3]
        logits = (scale * torch.randn(n, C, generator=rng)).to(dtype)
        q = unit_rows(n, 16, rng)
        figures = method.begin_epoch(epoch, lambda logits=logits, q=q: Out(logits.float(), q, q))
        assert all(math.isfinite(value) for value in figures.values())
        index = torch.randperm(n, generator=rng)[:12]
        outs = {view: Out(logits[index], q[index], q[index]) for view in method.views}
        method.refine(Batch(index, dict.fromkeys(method.views, logits[index])), Step(logits.sum(), {}, outs))
        now, added = method.S[every], method.added[every]
        assert_on(now, method.l[every])
        assert (now | ~before).all()
        assert torch.equal(now & ~S, added >= 0) and (added <= epoch).all()
        grown += not torch.equal(now, before)
        before = now
        if now.all():  # nothing can change any more: once more from the start
            method = blob_method(URRL, S, URRLConfig(k=5, phi=0.6, **form), d=4)
            before = S
    assert grown > 1  # the case is not empty
    count("epochs of random outputs, every invariant kept", kept=times(short, long), broken=0)
