"""S and l kept sparse give what the dense tensors give."""

import pytest
import torch

from tests.tools import PAPER_FORM, blob_method, distribution_on, random_sets
from urrl import labels
from urrl.evaluate import label_report
from urrl.labels import SparseLabels, row_blocks, weighted_rows
from urrl.methods import METHODS, Batch
from urrl.nets import Out

N, C, D = 90, 7, 12


def state(seed=0):
    rng = torch.Generator().manual_seed(seed)
    S = random_sets(N, C, rng)
    return S, distribution_on(S, rng), rng


def every(matrix):
    return matrix[torch.arange(len(matrix))]


@pytest.fixture
def blocks(monkeypatch):
    """Several blocks of rows, as of a large matrix."""
    monkeypatch.setattr(labels, "BLOCK", 20 * C)


def test_rows_go_in_and_come_out(blocks):
    S, l, rng = state()
    kept = SparseLabels([S])
    assert (every(kept.S) == S).all() and (every(kept.given) == S).all() and (every(kept.added) == -1).all()
    torch.testing.assert_close(every(kept.l), S.float() / S.sum(1, keepdim=True))
    rows = torch.randperm(N, generator=rng)[:40]
    kept.l[rows] = l[rows]
    assert (kept.l[rows] == l[rows]).all()
    assert (kept.S[torch.tensor([5, 3, 5])] == S[torch.tensor([5, 3, 5])]).all()
    assert kept.S[rows[:0]].shape == (0, C)
    assert (kept.S.sum(1) == S.sum(1)).all()
    assert torch.cat(list(row_blocks(kept.S))).tolist() == list(range(N)) and len(list(row_blocks(S))) > 1


def test_weighted_rows():
    S, l, rng = state(1)
    kept = SparseLabels([S])
    kept.l[torch.arange(N)] = l
    near = torch.randint(0, N, (11, 6), generator=rng)
    weights = torch.rand(11, 6, generator=rng)
    slow = torch.stack([sum(w * l[i] for i, w in zip(*row)) for row in zip(near, weights)])
    torch.testing.assert_close(weighted_rows(l, near, weights), slow)
    torch.testing.assert_close(weighted_rows(kept.l, near, weights), slow)
    torch.testing.assert_close(weighted_rows(kept.S, near, weights), weighted_rows(S, near, weights))


def test_labels_enter_in_any_order_and_again(blocks):
    S, l, rng = state(2)
    kept = SparseLabels([S])
    kept.l[torch.arange(N)] = l
    S, l, added = S.clone(), l.clone(), torch.full((N, C), -1)
    for epoch in (3, 4):
        open_rows = (~S).any(1).nonzero().squeeze(1)
        rows = open_rows[torch.randperm(len(open_rows), generator=rng)[:30]]
        label = (~S[rows]).float().multinomial(1, generator=rng).squeeze(1)
        share = torch.rand(len(rows), generator=rng)
        kept.enter(rows, label, share, epoch)
        S[rows, label], added[rows, label], l[rows, label] = True, epoch, share
        l[rows] /= l[rows].sum(1, keepdim=True)
        assert (every(kept.S) == S).all() and (every(kept.added) == added).all()
        assert (every(kept.given) == (S & (added < 0))).all()
        torch.testing.assert_close(every(kept.l), l)
    other = SparseLabels(every(kept.given).split(33))  # a checkpoint of a state that has grown
    other.load_state_dict(kept.state_dict())
    assert (every(other.added) == added).all() and (every(other.l) == every(kept.l)).all()


def train(method, x, epochs=3):
    """A few epochs with outputs of the method's own network."""
    optimiser = torch.optim.SGD(method.net.parameters(), 0.05)
    method.total_epochs = epochs
    method.prepare(x)
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        with torch.no_grad():
            out = Out(*(t.float() for t in method.net(x)))
        method.begin_epoch(epoch, lambda out=out: out)
        for index in torch.randperm(N).split(30):
            batch = Batch(index, {view: x[index] + 0.1 * torch.randn(len(index), D) for view in method.views})
            step = method.loss(batch)
            optimiser.zero_grad()
            step.total.backward()
            optimiser.step()
            method.refine(batch, step)


FAST_FORM = {"start": "vote", "vote": "sets", "one_view": "weak"}
FORMS: list[tuple[str, dict]] = [
    ("urrl", dict(phi=0.2, k=15, **PAPER_FORM)),
    ("urrl", dict(phi=0.2, k=15, **FAST_FORM)),
    ("urrl", dict(phi=0.2, k=15, learn="sets", **FAST_FORM)),
    ("irnet", dict(start=0.0, threshold=0.0)),
    *((name, {}) for name in METHODS if name not in ("urrl", "irnet")),
]


@pytest.mark.parametrize("name, options", FORMS)
def test_every_method_learns_the_same_from_sparse_state(name, options, monkeypatch, blocks):
    rng = torch.Generator().manual_seed(4)
    y = torch.arange(N) % C
    x = 3 * torch.randn(C, D, generator=rng)[y] + torch.randn(N, D, generator=rng)
    S = random_sets(N, C, rng)
    kind = METHODS[name]
    dense = blob_method(kind, S, kind.Config(**options), d=D)
    monkeypatch.setattr(labels, "DENSE", 0)
    sparse = blob_method(kind, S, kind.Config(**options), d=D)
    assert dense.kept is None and sparse.kept is not None
    for method in (dense, sparse):
        train(method, x)
    assert (every(sparse.S) == dense.S).all()
    torch.testing.assert_close(every(sparse.l), dense.l, rtol=1e-3, atol=1e-4)
    assert label_report(sparse, S, y) == label_report(dense, S, y)
    if name in ("urrl", "irnet"):
        assert (dense.S != S).any() and (every(sparse.added) == dense.added).all()
