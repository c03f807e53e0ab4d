"""Several processes give the answer of one, lose no item, end together and go on after a loss."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests import processes
from tests.runs import call, outcome
from tests.test_resume import lines, wait_for
from tests.tools import PAPER_FORM
from urrl import checkpoint, distributed
from urrl.candidates import generate
from urrl.cli import main
from urrl.data import DATASETS
from urrl.data.augment import POLICIES
from urrl.data.own import from_arrays
from urrl.data.stream import from_files
from urrl.distributed import everyone, gather, mean, partners, share, sum_gradients, summed, synchronise
from urrl.knn import cosine_topk
from urrl.methods import METHODS
from urrl.methods.urrl import URRL
from urrl.nets import build_network
from urrl.run import make_own_run, make_run, train
from urrl.train import batches, count_batches

# ---- shares of a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize(("n", "size"), [(23, 5), (6, 2), (12, 12)])
def test_every_item_is_seen_once_and_looks_the_same(monkeypatch, world, n, size):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 20, 20), dtype=torch.uint8, generator=rng)

    def epoch():
        rng = torch.Generator().manual_seed(1)
        indices = [*torch.randperm(n, generator=rng).tensor_split(count_batches(n, size))]
        return [*batches(x, indices, POLICIES["cifar"], ("weak", "strong"), rng)]

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
    torch.testing.assert_close(mine.grad, 6 * x[own])
    partner = torch.randperm(total, generator=rng)
    assert torch.equal(partners(x[own], partner), x[partner][own])
    assert torch.equal(gather([torch.arange(total)[own]], total)[0], torch.arange(total))
    return float(summed(torch.tensor(1.0)))


def _sought(total, k):
    """Every process finds the neighbours of its rows among all, which pass by in pieces."""
    q = torch.nn.functional.normalize(torch.randn(total, 3, generator=torch.Generator().manual_seed(total)), dim=1)
    own = share(total)
    similarity = (q @ q.T).fill_diagonal_(-torch.inf)
    expected = similarity.sort(descending=True).indices[:, : min(k, total - 1)]
    with mock.patch.object(distributed, "PIECE", 4):
        seen = list(cosine_topk(q[own], k))
        few = list(cosine_topk(q[own], k, torch.arange(len(q[own]))[1:]))
    rows, best, near = (torch.cat(part) for part in zip(*seen))
    assert torch.equal(rows, torch.arange(len(q[own])))
    assert torch.equal(near.sort().values, expected[own].sort().values)
    torch.testing.assert_close(best, similarity[own].gather(1, near))
    assert torch.equal(torch.cat([part for _, _, part in few]).sort().values, expected[own][1:].sort().values)


def _spread(counts):
    """Each process has some rows, in turn as many as `counts` says."""
    mine = sum(counts[: distributed.rank()]) + torch.arange(counts[distributed.rank()])
    assert torch.equal(everyone(mine), torch.arange(sum(counts)))
    assert torch.equal(everyone(mine[:, None] > 2), torch.arange(sum(counts))[:, None] > 2)
    values = torch.stack([mine.float(), 2.0 * mine])
    assert mean(values).tolist() == [(sum(counts) - 1) / 2, sum(counts) - 1]


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
    for total, k in ((2, 5), (5, 3), (41, 1), (41, 12), (41, 60)):
        _sought(total, k)
    for counts in ([3, 1, 0, 7], [0, 0, 0, 1], [2, 2, 2, 2]):
        _spread([*counts[: world - 1], sum(counts[world - 1 :])])
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

SETTINGS = {"epochs": 2, "width": 2, "batch_size": 40, "lr": 0.02, "sync_bn": True}
CORRECTING: dict[str, object] = {"k": 5, "phi": 0.2}
FORMS: dict[str, dict[str, object]] = {
    **{name: {} for name in METHODS},
    "urrl": CORRECTING,
    "urrl, paper form": {**CORRECTING, **PAPER_FORM},
    "urrl, unmixed": {**CORRECTING, "learn": "sets", "alpha": 0.0},
    "urrl, sure": {**CORRECTING, "learn": "sets", "alpha": 0.0, "voting": 0.0, "sure": 0.3, "sure_from": 0.0},
    "urrl, scout": {
        "learn": "sets",
        "alpha": 0.0,
        "voting": 0.0,
        "sure": 0.3,
        "sure_from": 0.0,
        "scout": 2,
        "scouting": 0.5,
        "width": 4,
    },
    "pico_plus": {"select": 0.1, "knn": 0.1},
    "alim": {"start": 0.1},
    "irnet": {"start": 0.1},
}  # each with all that it does in two epochs
TOLERANCE = 1e-5  # of weights, l, prototypes and queues after the two epochs: sums of floats in another order
FIGURES = 1e-4  # of the figures in the record, relative: some are quotients of small differences


def without_curves():
    return mock.patch("urrl.run.draw_curves", lambda history, path, title: path.touch())  # half of the time


def _train_all(folder, names, subset=120, **settings):
    with without_curves():
        for name in names:
            values = {**SETTINGS, **FORMS[name], **settings}
            cell = make_run("digits", name.partition(",")[0], "fast", values, eta=0.3, mu=0.3, seed=0, subset=subset)
            train(*cell, folder / name, device="cpu")


def assert_same_answer(a: Path, b: Path):
    """The same sets, labels and accuracies; the same numbers within the tolerance."""
    left, right = outcome(a), outcome(b)
    assert left["files"] == right["files"]
    for name, value in left["last"]["method"].items():
        other = right["last"]["method"][name]
        if value.is_floating_point():
            torch.testing.assert_close({name: value}, {name: other}, atol=TOLERANCE, rtol=TOLERANCE)
        else:
            assert torch.equal(value, other), name
    for x, y in [*zip(left["metrics"], right["metrics"], strict=True), (left["result"], right["result"])]:
        assert x.keys() == y.keys()
        for key in x.keys() - {"flops", "train_flops", "processes"}:  # each process computes the loss: a few more
            expected = x[key] if not isinstance(x[key], float) else pytest.approx(x[key], rel=FIGURES, abs=1e-9)
            assert y[key] == expected, key


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
    assert json.loads((tmp_path / "urrl, sure" / "metrics.jsonl").read_text().splitlines()[-1])["sure"] > 0


def _train_few(folder):
    """The last of four processes has no rows."""
    _train_all(folder, ("urrl, paper form", "pico"), subset=12, batch_size=3)


def test_more_processes_than_items_in_a_batch(tmp_path):
    _train_few(tmp_path / "1")
    processes.values(4, _train_few, tmp_path / "4")
    for run in (tmp_path / "1").iterdir():
        assert_same_answer(run, tmp_path / "4" / run.name)


def _features(folder):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 5, generator=rng), torch.arange(60) % 3
    x[torch.arange(60), y] += 3
    data = from_arrays(x, generate(y, 3, 0.3, 0.1).mask, "abc", y)
    run, splits, sets = make_own_run(data, "urrl", {"epochs": 2, "batch_size": 20, "sync_bn": True}, seed=0)
    with without_curves():
        train(run, data, splits, sets, folder, device="cpu")


def test_feature_vectors(tmp_path):
    """Their views swap values over the whole batch."""
    _features(tmp_path / "1")
    processes.values(3, _features, tmp_path / "3")
    assert_same_answer(tmp_path / "1", tmp_path / "3")


def _streamed(images, folder):
    y = torch.arange(48) % 3
    data = from_arrays(
        from_files(sorted(images.iterdir()), (1, 12, 12), workers=1), generate(y, 3, 0.3, 0.1).mask, "abc", y
    )
    run, splits, sets = make_own_run(data, "urrl", {"epochs": 2, "batch_size": 20, "width": 2, "sync_bn": True}, seed=0)
    with without_curves():
        train(run, data, splits, sets, folder, device="cpu")


def test_streamed_images(tmp_path):
    """Each process has workers of its own, which read its share."""
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(48):
        pixels = rng.integers(0, 100, (12, 12), dtype=np.uint8)
        pixels[4 * (i % 3) : 4 * (i % 3) + 4] += 100
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i:02}.png")
    _streamed(tmp_path / "images", tmp_path / "1")
    processes.values(2, _streamed, tmp_path / "images", tmp_path / "2")
    assert_same_answer(tmp_path / "1", tmp_path / "2")


# ---- a process is lost -----------------------------------------------------------------------------------

ARGUMENTS = shlex.split("train --dataset digits --subset 120 --epochs 3 --threads 1 --quiet --set width=2")
ARGUMENTS += shlex.split("--set batch_size=40 --set k=5 --set phi=0.2 --set sync_bn=true")


def _main(arguments, fails=None, step=0):
    """The command line; with `fails`, that happens to process 1 after so many steps."""
    steps = itertools.count(1)

    def refine(self, batch, outs, good=URRL.refine):
        if fails and os.environ["RANK"] == "1" and next(steps) == step:
            fails()
        good(self, batch, outs)

    with mock.patch.object(sys, "argv", ["urrl", *map(str, arguments)]), mock.patch.object(URRL, "refine", refine):
        sys.exit(main())


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _asleep():
    time.sleep(6)


def test_a_process_killed(tmp_path):
    """2 processes, one killed in the second epoch; 4 go on, one killed in the third; 1 ends it."""
    out = tmp_path / "run"
    for world, epoch, step in ((2, 1, 4), (4, 2, 4)):
        ended = processes.run(world, _main, [*ARGUMENTS, "--out", out, "--resume"], _killed, step)
        assert [e.code for e in ended] == [-signal.SIGKILL if rank == 1 else 1 for rank in range(world)]
        told = "".join(e.err for e in ended)
        assert told.count("\n") == 1 and "lost contact with the others" in told and "--resume" in told
        assert checkpoint.load(out / "last.ckpt")["state"]["epoch"] == epoch
        assert not (out / "result.json").exists()
    assert call(*ARGUMENTS, "--out", out, "--resume").code == 0
    assert call(*ARGUMENTS, "--out", tmp_path / "whole").code == 0
    assert_same_answer(tmp_path / "whole", out)


def test_a_process_that_answers_no_more(tmp_path):
    began = time.monotonic()
    ended = processes.run(2, _main, [*ARGUMENTS, "--out", tmp_path / "run"], _asleep, 4, URRL_TIMEOUT="2")
    assert [e.code for e in ended] == [1, 1]
    assert "lost contact with the others" in ended[0].err + ended[1].err
    assert time.monotonic() - began < 60


def torchrun(*arguments: object, restarts: int = 0) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.Popen([*launcher, "--max-restarts", str(restarts), "-m", "urrl", *map(str, arguments)], text=True,
                            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def workers(launcher: subprocess.Popen) -> list[int]:
    return [int(p) for p in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_starts_again_by_itself(tmp_path):
    """Killed twice, started again once: the first time it goes on by itself, the second time the job ends."""
    run = tmp_path / "run"
    job = torchrun(*ARGUMENTS[:5], "--epochs", 500, *ARGUMENTS[7:], "--out", run, restarts=1)
    wait_for(job, lambda: lines(run) >= 2)
    for victim in (1, 0):  # the first process is killed, too
        before, pids = lines(run), workers(job)
        os.kill(pids[victim], signal.SIGKILL)
        if victim:
            wait_for(job, lambda before=before, pids=pids: lines(run) > before + 2 and workers(job) != pids)
    out, err = job.communicate(timeout=60)
    assert job.returncode != 0 and out == "" and "SIGKILL" in err
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == list(range(len(records)))
    saved = checkpoint.load_epoch(run, lambda message: None)
    assert saved and saved["state"]["epoch"] >= len(records) - 1


# ---- mistakes, and the end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --dataset nowhere", "unknown dataset"),
        ("train --dataset digits --epochs x", "--epochs"),
        ("methods", "torchrun starts `urrl train` alone"),
        ("train --dataset digits --set net=mlp", "net 'mlp' does not take images"),
        ("train --dataset digits --subset 7 --set batch_size=4", "sync_bn"),
        ("train --dataset digits --subset 20 --out .", "not a run's folder"),
    ],
)
def test_a_mistake_is_told_once(arguments, message):
    ended = processes.run(2, _main, shlex.split(arguments))
    told = "".join(e.err for e in ended)
    assert [e.code for e in ended] == [2, 2], told
    assert told.count("\n") == 1 and message in told


def _without_data(arguments):
    if os.environ["RANK"] == "1":
        DATASETS.clear()
    _main(arguments)


def test_a_mistake_of_one_machine_is_told(tmp_path):
    ended = processes.run(2, _without_data, [*ARGUMENTS, "--out", tmp_path / "run"])
    told = "".join(e.err for e in ended)
    assert [e.code for e in ended] == [2, 2], told
    assert told.count("\n") == 1 and "unknown dataset" in told
    assert not (tmp_path / "run").exists()


def test_the_end_is_clean():
    for _ in range(5):
        assert processes.values(3, distributed.world) == [3] * 3
