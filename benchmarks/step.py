"""What URRL costs on top of its network.

step_ratio:  a whole URRL training step (views made, loss, backward, SGD, labels refined) over a bare
             forward + backward + SGD of the same network on the same three views, ready made. Interleaved, median.
epoch_ratio: everything done once an epoch (prototype pass, neighbours, correction, validation) over the epoch.

Both for the paper's form of URRL, three views a step, on the fast net. `..._fast` is the same for the recipe `fast`,
whose steps have one view: they are three times cheaper, so what is done once an epoch weighs more.

    python benchmarks/step.py [--repeats 15] [--data-dir D]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from urrl.allocator import keep_memory
from urrl.candidates import generate
from urrl.config import Training, resolve
from urrl.data import Dataset, load
from urrl.data.augment import find_policy, make_views
from urrl.errors import UserError
from urrl.methods import Batch
from urrl.methods.urrl import URRL
from urrl.nets import Network, build_network
from urrl.run import make_run, train


def synthetic_cifar() -> Dataset:
    """Random pixels: the cost of a step does not depend on what they show."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (6000, 3, 32, 32), dtype=torch.uint8, generator=rng)
    return Dataset("cifar10", x, torch.arange(6000) % 10, tuple("0123456789"), 1000, "cifar")


def get(name: str, data_dir: Path | None) -> Dataset:
    try:
        return load(name, data_dir)
    except UserError:
        if name != "cifar10":
            raise
        return synthetic_cifar()


def timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


PAPER_FORM = {
    "start": "uniform",
    "vote": "labels",
    "one_view": "",
    "alpha": 8.0,
    "w_m": 5.0,
}  # the fast net, the paper's method


def step_ratio(dataset: Dataset, settings: dict[str, Any], repeats: int) -> tuple[float, float]:
    """(ratio, milliseconds of a bare step)"""
    run = resolve(dataset.name, "urrl", "fast", URRL.Config, settings, eta=0.3, mu=0.3, convention="paper", seed=0,
                  split="paper", subset=None)  # fmt: skip
    t: Training = run.training
    policy = find_policy(dataset.augment)
    x, y = dataset.x[:4096], dataset.truth[:4096]
    shape = tuple(x.shape[1:])

    def network() -> tuple[Network, torch.optim.SGD]:
        net = build_network(t.net, shape, 10, t.width, t.embed_dim, t.head)
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net, torch.optim.SGD(net.parameters(), t.lr, t.momentum, nesterov=t.nesterov)

    net, optimiser = network()
    method = URRL(net, generate(y, 10, 0.3, 0.3), run.options)
    bare_net, bare_optimiser = network()
    rng = torch.Generator().manual_seed(0)
    index = torch.randperm(len(x), generator=rng)[: t.batch_size]
    names = (run.options.one_view,) if run.options.one_view else ("weak", "strong", "weak2")
    ready = torch.cat([*make_views(x[index], names, policy, rng).values()])
    target = y[index].repeat(len(names))

    def whole() -> None:
        batch = Batch(index, make_views(x[index], method.views, policy, rng))
        step = method.loss(batch)
        optimiser.zero_grad(set_to_none=True)
        step.total.backward()
        optimiser.step()
        method.refine(batch, step)

    def bare() -> None:
        out = bare_net(ready)
        loss = F.cross_entropy(out.logits, target) + out.q.square().mean()
        bare_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        bare_optimiser.step()

    whole()
    bare()
    pairs = [(timed(whole), timed(bare)) for _ in range(repeats)]
    return statistics.median(a / b for a, b in pairs), 1000 * statistics.median(b for _, b in pairs)


def epoch_ratio(settings: dict[str, Any], data_dir: Path | None, subset: int | None, epochs: int = 3) -> float:
    """Of the costliest of a few real epochs on F-MNIST."""
    run, dataset, splits, sets = make_run("fmnist", "urrl", "fast", {"epochs": epochs, **settings}, eta=0.3, mu=0.3,
                                          seed=0, subset=subset, data_dir=data_dir)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(run, dataset, splits, sets, Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line)["once_per_epoch"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--subset", type=int, help="items of the epoch measurement (default: all of F-MNIST)")
    args = parser.parse_args()
    keep_memory()  # as `urrl train` does
    figures: dict[str, float] = {}
    print(f"{'':<40}{'ratio':>8}{'bare step':>12}")
    for name, title in (("fmnist", "F-MNIST"), ("cifar10", "CIFAR + AutoAugment")):
        dataset = get(name, args.data_dir)
        for suffix, settings in (("", PAPER_FORM), ("_fast", {})):
            ratio, milliseconds = step_ratio(dataset, settings, args.repeats)
            figures[f"step_ratio_{name}{suffix}"] = ratio
            print(f"{'step, ' + title + suffix.replace('_', ', '):<40}{ratio:>8.3f}{milliseconds:>9.0f} ms", flush=True)
    figures["step_ratio"] = max(figures["step_ratio_fmnist"], figures["step_ratio_cifar10"])
    # A low phi makes the correction search many rows.
    figures["epoch_ratio"] = epoch_ratio({**PAPER_FORM, "phi": 0.5}, args.data_dir, args.subset)
    figures["epoch_ratio_fast"] = epoch_ratio({}, args.data_dir, args.subset)
    for suffix in ("", "_fast"):
        title = "once an epoch / epoch" + suffix.replace("_", ", ")
        print(f"{title:<40}{figures['epoch_ratio' + suffix]:>8.3f}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
