"""What the loop and its process do besides learning."""

import dataclasses
import itertools
import json
import math
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.runs import TINY, call
from urrl import checkpoint, train
from urrl.config import Training
from urrl.data.augment import find_policy, normalise
from urrl.errors import UserError
from urrl.evaluate import infer, looks, outputs
from urrl.methods.average import Average
from urrl.nets import Network, build_network


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert call(*TINY, "--out", folder).code == 0
    return json.loads((folder / "result.json").read_text())


def test_a_compiled_run_learns_the_same_and_counts_the_same(plain, tmp_path, monkeypatch):
    compiled = []

    def traced(self, **options):  # the compiler proper would take minutes
        compiled.append(options)
        nn.Module.compile(self, backend="eager", **options)

    monkeypatch.setattr(Network, "compile", traced)
    done = call(*TINY, "--set", "compile=true", "--out", tmp_path / "run")
    assert done.code == 0 and compiled == [{"dynamic": True}]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["train_flops"] == plain["train_flops"]
    assert result["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.05)


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    done = call(*TINY, "--set", "compile=true", "--out", tmp_path / "run")
    assert done.code == 2 and "C++ compiler" in done.err and not (tmp_path / "run").exists()


def test_half_precision_is_for_gpus_and_who_asks():
    assert train.half_precision(torch.device("cpu")) is None
    assert train.half_precision(torch.device("mps")) is None
    assert train.half_precision(torch.device("cpu"), bf16=True) == torch.bfloat16


def test_what_a_method_looks_at_after_a_step_is_counted(tmp_path):
    flops = {}
    for method in ("proden", "rc"):  # RC asks the stepped network once more
        small = ("train", "--dataset", "digits", "--subset", "40", "--epochs", "1", "--set", "width=2", "--quiet")
        assert call(*small, "--method", method, "--out", tmp_path / method).code == 0
        flops[method] = json.loads((tmp_path / method / "result.json").read_text())["train_flops"]
    assert flops["rc"] > 1.1 * flops["proden"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone gives memory back at every step")
def test_memory_is_kept():
    code = "\n".join([
        "import resource, sys, numpy",
        "from urrl.allocator import keep_memory",
        "if sys.argv[1] == 'kept': keep_memory()",
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        "step = lambda: [numpy.ones(10_000_000, dtype=numpy.uint8) for _ in range(4)]",
        "step(), step()",
        "before = faults()",
        "step()",
        "print(faults() - before)",
    ])  # fmt: skip
    pages = {
        how: int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    assert pages["kept"] < 100 < pages["given back"]


@pytest.mark.parametrize("flip, move", [(True, 0), (False, 1), (True, 2)])
def test_a_prediction_is_the_mean_over_mirrored_and_moved_images(flip, move):
    policy = find_policy("digits")
    x = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    net = build_network("fast", (1, 8, 8), 3, 4, 8, "linear").eval()
    one = infer(net, x, policy)
    out = infer(net, x, policy, flip, move)
    assert torch.equal(out.feature, one.feature) and torch.equal(out.q, one.q)
    expected = torch.zeros(5, 3)
    for weight, step in [(1.0, 0)] if not move else [(0.5, 0), (0.25, move), (0.25, -move)]:
        wide = np.pad(x.numpy(), ((0, 0), (0, 0), (move, move), (move, move)), "reflect")
        moved = torch.from_numpy(wide[:, :, move + step :, move + step :][:, :, :8, :8])
        mirrored = [moved, moved.flip(3)] if flip else [moved]
        expected += weight * sum(infer(net, view, policy).logits.softmax(1) for view in mirrored) / len(mirrored)
    torch.testing.assert_close(out.logits.exp(), expected)
    torch.testing.assert_close(out.logits.exp().sum(1), torch.ones(5))


def test_a_look_in_its_turn():
    policy = find_policy("digits")
    x = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    net = build_network("fast", (1, 8, 8), 3, 4, 8, "linear").eval()
    for turn, (_, look) in enumerate(2 * looks(normalise(x, policy), True, 1)):
        assert torch.equal(outputs(net, x, policy, True, 1, turn=turn).logits, net(look).logits)
    assert torch.equal(outputs(net, x, policy, turn=7).logits, outputs(net, x, policy).logits)  # there is but one


def test_strong_views_of_grey_images_by_autoaugment(tmp_path, monkeypatch):
    """cutout and autoaugment change the policy of the views alone, not that of predictions."""
    seen = []
    make = train.make_views

    def noted(x, names, policy, *more):
        seen.append((policy.cutout, policy.autoaugment, policy.pad))
        return make(x, names, policy, *more)

    monkeypatch.setattr(train, "make_views", noted)
    assert call(*TINY, "--out", tmp_path / "paper").code == 0
    assert set(seen) == {(3, False, 1)}
    seen.clear()
    settings = "--set cutout=0 --set autoaugment=true --set pad=2"
    assert call(*TINY, *settings.split(), "--out", tmp_path / "own").code == 0
    assert set(seen) == {(0, True, 2)}


def test_bf16_is_for_what_is_learned(plain, tmp_path, monkeypatch):
    """Of a run on a CPU that asks for it: steps, the looks at all items between epochs and validation, not the test;
    weights stay float32."""
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    forward = nn.Conv2d.forward

    def noted(self, x):
        out = forward(self, x)
        seen[torch.is_grad_enabled()].add(out.dtype)
        return out

    monkeypatch.setattr(nn.Conv2d, "forward", noted)
    assert call(*TINY, "--set", "bf16=true", "--out", tmp_path / "run").code == 0
    assert seen == {True: {torch.bfloat16}, False: {torch.bfloat16, torch.float32}}
    state = checkpoint.load(tmp_path / "run" / "last.ckpt")
    assert all(t.dtype != torch.bfloat16 for t in state["method"].values())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["train_flops"] == plain["train_flops"]
    assert result["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.1)


def test_the_stem_learns_in_the_first_tenth_of_a_run(tmp_path, monkeypatch):
    biases = []
    save = checkpoint.save_epoch

    def noted(folder, state):
        biases.append(next(t.clone() for name, t in state["method"].items() if name.endswith("stem.0.bias")))
        save(folder, state)

    monkeypatch.setattr(checkpoint, "save_epoch", noted)
    rng = np.random.default_rng(0)
    x, candidates = rng.integers(256, size=(60, 16, 16), dtype=np.uint8), np.eye(2, dtype=bool)[np.arange(60) % 2]
    np.savez(tmp_path / "x.npz", x=x, candidates=candidates)
    short = "--method average --epochs 11 --threads 1 --quiet --set net=lean --set width=2 --set batch_size=20"
    assert call("train", "--npz", tmp_path / "x.npz", *short.split(), "--out", tmp_path / "run").code == 0
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(biases)]
    assert biases[0].any() and changed == [True] + 9 * [False]


def test_a_member_learns_as_if_it_were_alone(tmp_path, monkeypatch):
    """One step on images as they are: the first of three members ends where a single network does. And in an epoch of
    several steps each member sees each item once."""
    batches = []
    loss = Average.loss

    def noted(self, batch):
        batches.append(batch.index)
        return loss(self, batch)

    monkeypatch.setattr(Average, "loss", noted)
    monkeypatch.setattr(Average, "views", ("plain", "plain2"))
    small = "train --dataset digits --method average --subset 60 --epochs 1 --threads 1 --quiet --set width=2"
    one_step = "--set batch_size=1000 --set ema=0 --set lr=0.01"
    weights = []
    for members in (1, 3):
        folder = tmp_path / str(members)
        assert call(*small.split(), *one_step.split(), "--set", f"members={members}", "--out", folder).code == 0
        weights.append(checkpoint.load(folder / "last.ckpt")["method"])
    alone = {name: t for name, t in weights[0].items() if name.startswith("net.")}
    assert len(batches) == 2 and len(batches[1]) == 180
    for name, t in alone.items():
        torch.testing.assert_close(weights[1][name.replace("net.", "net.networks.0.")], t)

    batches.clear()
    assert call(*small.split(), "--set", "batch_size=8", "--set", "members=3", "--out", tmp_path / "steps").code == 0
    assert len(batches) == 8
    for seen in zip(*(index.tensor_split(3) for index in batches)):
        assert sorted(torch.cat(seen).tolist()) == list(range(60))


def shrunk(training: Training, steps: int) -> float:
    """What is left of a weight that SGD moves by weight decay alone, step by step."""
    weight = nn.Parameter(torch.ones(()))
    decay = train.weight_decay(training, steps)
    optimiser = torch.optim.SGD([weight], training.lr, training.momentum, weight_decay=decay, nesterov=True)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = train.learning_rate(step, steps, training)
        weight.grad = torch.zeros(())
        optimiser.step()
    return weight.item()


@pytest.mark.parametrize(("steps", "lr", "momentum"), [(1000, 0.1, 0.9), (5000, 0.1, 0.9), (1000, 0.02, 0.5)])
def test_decay_that_fits_the_run_shrinks_weights_alike(steps, lr, momentum):
    training = Training(weight_decay=-1.0, lr=lr, momentum=momentum, nesterov=True, warmup=0.2, schedule="linear")
    assert -math.log(shrunk(training, steps)) == pytest.approx(train.SHRINK, rel=0.05)


def test_a_learning_rate_that_climbs_again():
    training = Training(lr=0.2, warmup=0.2, schedule="linear", again=0.4, weight_decay=-1.0, nesterov=True)
    rates = [train.learning_rate(step, 999, training) for step in range(999)]
    for peak, top, start, end in ((80, 0.2, 0, 400), (520, 0.2 * train.SECOND, 400, 999)):
        part = rates[start:end]
        assert max(part) == pytest.approx(top, rel=0.02) and start + part.index(max(part)) == pytest.approx(peak, abs=2)
        assert part[0] < 0.003 and part[-1] < 0.003
    assert -math.log(shrunk(training, 1000)) == pytest.approx(train.SHRINK, rel=0.05)


def test_a_scout_and_the_network_after_it_have_a_climb_and_a_decay_each():
    training = Training(
        lr=0.2, warmup=0.2, schedule="linear", scout=8, scouting=0.4, weight_decay=-1.0, nesterov=True, patience=0
    )
    rates = [train.learning_rate(step, 1000, training) for step in range(1000)]
    alone = dataclasses.replace(training, scout=0)
    for start, end in [(0, 400), (400, 1000)]:
        assert rates[start:end] == pytest.approx(
            [train.learning_rate(step, end - start, alone) for step in range(end - start)], abs=1e-3
        )
        decay = train.weight_decay(training, 1000, start / 1000, end / 1000)
        assert decay == pytest.approx(train.weight_decay(alone, end - start))
    twice = dataclasses.replace(training, again=0.1)
    tops = [(0.0, 0.1, 1.0), (0.1, 0.4, train.SECOND), (0.4, 1.0, 1.0)]
    assert train.climbs(twice) == tops
    for begin, to, top in tops:
        part = [train.learning_rate(step, 1000, twice) for step in range(round(1000 * begin), round(1000 * to))]
        assert max(part) == pytest.approx(0.2 * top, rel=0.05) and min(part[0], part[-1]) < 0.01
    way = 0.1 * (0.1 + 0.3 * train.SECOND) * 1000
    assert train.weight_decay(twice, 1000, 0.0, 0.4) == pytest.approx(train.SHRINK * 0.1 / way)
    shares = [(100, 0.4, 40), (100, 0.41, 41), (48, 0.375, 18), (3, 0.1, 1), (2, 0.9, 1), (1, 0.4, 0)]
    for epochs, share, scouted in shares:
        assert train.scouted(dataclasses.replace(training, epochs=epochs, scouting=share)) == scouted
    assert train.scouted(dataclasses.replace(training, scout=0)) == 0


def test_decay_that_is_given_stays():
    assert train.weight_decay(Training(weight_decay=0.003), 10) == 0.003
    assert train.weight_decay(Training(weight_decay=0.0), 10) == 0
    assert train.weight_decay(Training(weight_decay=-1.0, lr=0.0), 10) == 0  # nothing would be learned anyway
    with pytest.raises(UserError, match=r"weight_decay must be at least 0, or -1, not -0\.5"):
        Training(weight_decay=-0.5)


@pytest.mark.parametrize("pace", [0.0, 1.0, 16.0])
def test_norm_lr_is_the_pace_of_the_biases_of_normalisation_layers(pace, tmp_path):
    """One step from zero: as far as the learning rate takes them, times the pace; all else goes as it went."""
    one = "train --dataset digits --subset 120 --epochs 1 --threads 1 --quiet --set width=2 --set batch_size=1000"
    one += " --set momentum=0 --set nesterov=false --set ema=0"
    weights = {}
    for value in (1.0, pace):
        folder = tmp_path / str(value)
        if not folder.exists():
            assert call(*one.split(), "--set", f"norm_lr={value}", "--out", folder).code == 0
        weights[value] = checkpoint.load(folder / "last.ckpt")["method"]
    net = build_network("fast", (1, 8, 8), 10, 2, 64, "linear")
    layers = {name for name, layer in net.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    biases = {f"net.{name}.bias" for name in layers}
    assert biases <= weights[pace].keys() and any(weights[1.0][name].abs().max() > 0 for name in biases)
    for name in (name for name in weights[1.0] if name.startswith("net.")):
        was, now = weights[1.0][name], weights[pace][name]
        torch.testing.assert_close(now, pace * was if name in biases else was)
