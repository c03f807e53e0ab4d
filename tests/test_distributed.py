"""Several processes give the answer of one, lose no item, end together and go on after a loss."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.runs import call, outcome, without
from tests.tools import PAPER_FORM
from urrl import checkpoint, distributed
from urrl.data.augment import POLICIES
from urrl.distributed import gather, partners, share, sum_gradients, summed, synchronise
from urrl.methods import METHODS
from urrl.nets import build_network
from urrl.run import make_run, train
from urrl.train import batches

# ---- shares of a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize(("n", "size"), [(23, 5), (6, 2), (12, 12)])
def test_every_item_is_seen_once_and_looks_the_same(monkeypatch, world, n, size):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 20, 20), dtype=torch.uint8, generator=rng)

    def epoch():
        return [*batches(x, POLICIES["cifar"], ("weak", "strong"), size, torch.Generator().manual_seed(1))]

    whole = epoch()
    assert sorted(torch.cat([batch.index for batch in whole]).tolist()) == list(range(n))
    monkeypatch.setattr(distributed, "_world", world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "_rank", rank)
        shares.append(epoch())
    for batch, parts in zip(whole, zip(*shares), strict=True):
        assert all(torch.equal(part.index, batch.index) for part in parts)
        sizes = [len(part.views["weak"]) for part in parts]
        assert sum(sizes) == len(batch.index) and max(sizes) - min(sizes) <= 1
        for view in batch.views:
            assert torch.equal(torch.cat([part.views[view] for part in parts]), batch.views[view])


# ---- what moves between processes ------------------------------------------------------------------------


def _moves(total):
    """What each process gets of tables that all of them know."""
    rng = torch.Generator().manual_seed(total)
    x, y = torch.randn(total, 2, 3, generator=rng), torch.randn(total, generator=rng)
    own = share(total)
    mine = x[own].clone().requires_grad_()
    whole, whole_y = gather([mine, y[own]], total)
    assert torch.equal(whole, x) and torch.equal(whole_y, y)
    (whole.square().sum() * 3).backward()  # the same on every process
    assert torch.allclose(mine.grad, 6 * x[own])
    partner = torch.randperm(total, generator=rng)
    assert torch.equal(partners(x[own], partner), x[partner][own])
    assert torch.equal(gather([torch.arange(total)[own]], total)[0], torch.arange(total))
    return float(summed(torch.tensor(1.0)))


def _normalised(x, target):
    """Outputs, gradients and running statistics of a network on this process's rows."""
    torch.manual_seed(0)
    net = build_network("fast", tuple(x.shape[1:]), 3, 2, 4, "linear")
    synchronise(net)
    own = share(len(x))
    out = net(x[own].contiguous(memory_format=torch.channels_last))
    logits, q = gather([out.logits, out.q], len(x))
    (torch.nn.functional.cross_entropy(logits, target) + (q @ q.T).square().mean()).backward()
    sum_gradients(net)
    return logits.detach(), [p.grad for p in net.parameters()], net.state_dict()


def _bits(world):
    for total in (1, world - 1, world, 2 * world + 1, 50):
        assert _moves(total) == world
    rng = torch.Generator().manual_seed(5)
    x, target = torch.randn(9, 1, 8, 8, generator=rng), torch.arange(9) % 3
    return [_normalised(x[:n], target[:n]) for n in (3, 9)]  # 3: fewer than processes


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(world):
    alone = _bits(1)
    for job in processes.values(world, _bits, world):
        for (logits, gradients, state), (logits1, gradients1, state1) in zip(job, alone):
            torch.testing.assert_close(logits, logits1, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(gradients, gradients1, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(dict(state), dict(state1), atol=1e-5, rtol=1e-4)


# ---- the same answer -------------------------------------------------------------------------------------

SETTINGS = {"epochs": 2, "width": 2, "batch_size": 40, "sync_bn": True}
CORRECTING = {"k": 5, "phi": 0.2}
FORMS = {
    **{name: {} for name in METHODS},
    "urrl": CORRECTING,
    "urrl, paper form": {**PAPER_FORM, **CORRECTING},
    "pico_plus": {"select": 0.1, "knn": 0.1},
    "alim": {"start": 0.1},
    "irnet": {"start": 0.1},
}  # each with all that it does in two epochs
TOLERANCE = 2e-4  # of weights, l, prototypes and queues after the two epochs: sums of floats in another order


def _train_all(folder, names, resume=False, **settings):
    for name in names:
        values = {**SETTINGS, **FORMS[name], **settings}
        run, dataset, splits, sets = make_run(
            "digits", name.partition(",")[0], "fast", values, eta=0.3, mu=0.3, seed=0, subset=120
        )
        train(run, dataset, splits, sets, folder / name, resume, "cpu")


def assert_same_answer(a: Path, b: Path):
    """The same sets, labels and accuracies; the same numbers within the tolerance."""
    left, right = outcome(a), outcome(b)
    assert left["files"] == right["files"]
    for name, value in left["last"]["method"].items():
        other = right["last"]["method"][name]
        if value.is_floating_point():
            torch.testing.assert_close(value, other, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(value, other), name
    for x, y in [*zip(left["metrics"], right["metrics"], strict=True), (left["result"], right["result"])]:
        assert without(x, "flops" if "flops" in x else "train_flops").keys() <= y.keys()
        for key in ("val_accuracy", "test_accuracy", "label_accuracy", "corrected", "true_in_set_after"):
            assert x.get(key) == y.get(key), key
        assert x.get("loss") == pytest.approx(y.get("loss"), rel=TOLERANCE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Every method, by one process."""
    folder = tmp_path_factory.mktemp("alone")
    _train_all(folder, FORMS)
    return folder


def test_every_method_with_two_processes(alone, tmp_path):
    processes.values(2, _train_all, tmp_path, list(FORMS))
    for name in FORMS:
        assert_same_answer(alone / name, tmp_path / name)
        assert json.loads((tmp_path / name / "result.json").read_text())["processes"] == 2
    assert json.loads((tmp_path / "urrl, paper form" / "result.json").read_text())["corrected"] > 0


def test_more_processes_than_items_in_a_batch(tmp_path):
    names = ("urrl, paper form", "pico")
    small = {"batch_size": 3, "epochs": 1, "lr": 0.01}
    _train_all(tmp_path / "1", names, **small)
    processes.values(4, _train_few, tmp_path / "4", names, small)
    for name in names:
        assert_same_answer(tmp_path / "1" / name, tmp_path / "4" / name)


def _train_few(folder, names, settings):
    _train_all(folder, names, **settings)
