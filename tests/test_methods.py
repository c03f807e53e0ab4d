"""One battery over every method: what each must hold, whatever its loss."""

from dataclasses import dataclass

import pytest
import torch

from tests.tools import blob_method, unit_rows
from urrl.candidates import CandidateSets, generate
from urrl.methods import METHODS, Batch
from urrl.methods.urrl import URRL, URRLConfig
from urrl.nets import Out

D, C, N = 12, 4, 240


def blobs(seed=0, n=N):
    """Four well separated clusters in 12 dimensions."""
    rng = torch.Generator().manual_seed(seed)
    centres = 3 * unit_rows(C, D, torch.Generator().manual_seed(77))
    y = torch.arange(n) % C
    return centres[y] + 0.4 * torch.randn(n, D, generator=rng), y


def sets_for(kind, y, eta=0.3, mu=0.2):
    return CandidateSets.of_labels(y, C) if kind.bound == "upper" else generate(y, C, eta, mu, seed=1)


def views_of(kind, x, index):
    return {view: x[index] + 0.05 * torch.randn(len(index), D) for view in kind.views}


def train(method, kind, x, epochs, lr=0.05, batch=60):
    optimiser = torch.optim.SGD(method.net.parameters(), lr, momentum=0.9)
    losses = []
    method.total_epochs = epochs
    method.prepare(x)
    for epoch in range(epochs):
        method.begin_epoch(epoch, lambda: everything(method, x))
        method.train()
        for index in torch.randperm(len(x)).split(batch):
            b = Batch(index, views_of(kind, x, index))
            step = method.loss(b)
            optimiser.zero_grad()
            step.total.backward()
            optimiser.step()
            method.refine(b, step)
            losses.append(step.total.item())
    return losses


@torch.no_grad()
def everything(method, x):
    was = method.net.training
    method.net.eval()
    out = method.net(x)
    method.net.train(was)
    return Out(*out)


@dataclass(frozen=True)
class FastConfig(URRLConfig):
    start: str = "vote"
    vote: str = "sets"
    one_view: str = "strong"


class FastURRL(URRL):
    """URRL with the switches of the fast recipe."""

    views = ("strong",)
    Config = FastConfig


@pytest.fixture(params=[*METHODS, "urrl, fast"])
def kind(request):
    return METHODS.get(request.param, FastURRL)


def test_labels_stay_distributions_on_sets_that_never_shrink(kind):
    x, y = blobs()
    method = blob_method(kind, sets_for(kind, y).mask, d=D)
    before = method.S.clone()
    losses = train(method, kind, x, 6)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert (method.S | ~before).all()
    torch.testing.assert_close(method.l.sum(1), torch.ones(N))
    assert (method.l >= 0).all() and (method.l[~method.S] == 0).all()


# These hold that the true label is a candidate, and fit the sets in which it is not, as they should.
TRUSTING = ("proden", "rc", "cc", "pico", "cr_dpll", "average")


def test_learns_blobs(kind):
    x, y = blobs()
    torch.manual_seed(0)
    trusting = kind in [METHODS[name] for name in TRUSTING]
    method = blob_method(kind, sets_for(kind, y, mu=0.0 if trusting else 0.2).mask, d=D)
    train(method, kind, x, 25)
    x_new, y_new = blobs(seed=9)
    assert (everything(method, x_new).logits.argmax(1) == y_new).double().mean() > 0.95


def test_state_round_trips_and_goes_on_bit_for_bit(kind):
    x, y = blobs()
    torch.manual_seed(0)
    first = blob_method(kind, sets_for(kind, y).mask, d=D)
    train(first, kind, x, 2)
    second = blob_method(kind, sets_for(kind, y).mask, d=D, seed=5)
    second.load_state_dict(first.state_dict())
    for method in (first, second):
        torch.manual_seed(3)
        train(method, kind, x, 2)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values()):
        assert torch.equal(a, b), name


def test_everything_that_changes_is_in_the_state(kind):
    """Memory outside the buffers would be lost at a resume: no tensor may hang on a method anywhere else."""
    x, y = blobs()
    method = blob_method(kind, sets_for(kind, y).mask, d=D)
    train(method, kind, x, 1)
    known = {id(t) for t in [*method.parameters(), *method.buffers()]}
    for module in method.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                assert not isinstance(value, torch.Tensor) or id(value) in known, name


def test_one_item_per_refine_touches_only_its_rows(kind):
    x, y = blobs()
    method = blob_method(kind, sets_for(kind, y, eta=0.6).mask, d=D)
    method.begin_epoch(0, lambda: everything(method, x))
    before = method.l.clone()
    index = torch.tensor([3, 17, 40])
    b = Batch(index, views_of(kind, x, index))
    method.refine(b, method.loss(b))
    others = torch.ones(N, dtype=torch.bool)
    others[index] = False
    assert torch.equal(method.l[others], before[others])


def test_more_classes_than_items_and_two_classes(kind):
    for n, classes in ((6, 9), (8, 2)):
        y = torch.arange(n) % classes
        sets = CandidateSets.of_labels(y, classes) if kind.bound == "upper" else generate(y, classes, 0.3, 0.3)
        method = blob_method(kind, sets.mask, d=D)
        losses = train(method, kind, torch.randn(n, D), 3, batch=4)
        assert all(torch.isfinite(torch.tensor(losses)))
