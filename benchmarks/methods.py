"""What a step of each method costs.

to supervised: a whole step (views made, loss, backward, SGD, memory refined) over supervised's whole step.
to bare:       the same over the bare passes of the network that the method makes: forward + backward + SGD of as many
               ready-made images as it learns from, and a forward alone of as many as it only looks at.
The images of a step are counted, not declared. All methods take turns in one run; medians of the ratios of neighbours.
The fast net on random images in batches of 256, in the main phase of the run, after every warm-up.

    python benchmarks/methods.py [--repeats 9] [--methods proden,pico] [--data fmnist|cifar10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from step import PAPER_FORM

from urrl.allocator import keep_memory
from urrl.candidates import CandidateSets, generate
from urrl.config import resolve
from urrl.data.augment import POLICIES, make_views
from urrl.methods import METHODS, Batch
from urrl.nets import Network, Out, build_network

ITEMS, CLASSES, EPOCHS = 16_384, 10, 100
SHAPES = {"fmnist": (1, 28, 28), "cifar10": (3, 32, 32)}


class Contender:
    """A method with its own network and optimiser, and the bare passes that it makes."""

    def __init__(self, name: str, data: str):
        cell: dict[str, Any] = dict(eta=0.3, mu=0.3, convention="paper", seed=0, split="paper", subset=None)
        name, settings = ("urrl", PAPER_FORM) if name == "urrl_paper" else (name, {})
        kind = METHODS[name]
        self.shape = SHAPES[data]
        run = resolve(data, name, "fast", kind.Config, settings, **cell)
        self.t = run.training
        torch.manual_seed(0)
        y = torch.randint(0, CLASSES, (ITEMS,))
        self.x = torch.randint(0, 256, (ITEMS, *self.shape), dtype=torch.uint8)
        sets = CandidateSets.of_labels(y, CLASSES) if kind.bound == "upper" else generate(y, CLASSES, 0.3, 0.3)
        self.rng = torch.Generator().manual_seed(0)
        self.policy = POLICIES["fmnist" if data == "fmnist" else "cifar"]
        net, self.optimiser = self.network()
        self.method = kind(net, sets, run.options)
        self.method.total_epochs = EPOCHS
        self.method.train()
        self.index = torch.arange(self.t.batch_size)
        self.method.begin_epoch(EPOCHS - 1, self.outputs)
        self.learned, self.looked_at = self.count()
        self.bare_net, self.bare_optimiser = self.network()
        images = make_views(self.x[: self.t.batch_size], ("weak",), self.policy, self.rng)["weak"]
        batches = -(-max(self.learned, self.looked_at) // len(images))
        self.images = images.repeat(batches, 1, 1, 1).contiguous(memory_format=torch.channels_last)
        self.target = y[: len(images)].repeat(batches)

    def network(self) -> tuple[Network, torch.optim.Optimizer]:
        t = self.t
        net = build_network(t.net, self.shape, CLASSES, t.width, t.embed_dim, t.head)
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net, torch.optim.SGD(net.parameters(), t.lr, t.momentum, nesterov=t.nesterov)

    def outputs(self) -> Out:
        """For begin_epoch: what stands in for a pass over all items, whose cost is not a step's."""
        q = F.normalize(torch.randn(ITEMS, self.t.embed_dim), dim=1)
        return Out(torch.randn(ITEMS, CLASSES), q, torch.randn(ITEMS, int(self.method.net.classifier.in_features)))

    def count(self) -> tuple[int, int]:
        """(images with a gradient, images without) of one step, through any copy of the network."""
        counted = {True: 0, False: 0}

        def add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            counted[torch.is_grad_enabled()] += len(inputs[0])

        networks = [module for module in self.method.modules() if isinstance(module, Network)]
        hooks = [network.register_forward_pre_hook(add) for network in networks]
        self.whole()
        for hook in hooks:
            hook.remove()
        return counted[True], counted[False]

    def whole(self) -> None:
        batch = Batch(self.index, make_views(self.x[self.index], self.method.views, self.policy, self.rng))
        step = self.method.loss(batch)
        self.optimiser.zero_grad(set_to_none=True)
        step.total.backward()
        self.optimiser.step()
        self.method.refine(batch, step)

    def bare(self) -> None:
        if self.looked_at:
            with torch.no_grad():
                self.bare_net(self.images[: self.looked_at])
        out = self.bare_net(self.images[: self.learned])
        loss = F.cross_entropy(out.logits, self.target[: self.learned]) + out.q.square().mean()
        self.bare_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.bare_optimiser.step()


def timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--methods", help="some of them, by comma; supervised always runs")
    parser.add_argument("--data", default="fmnist", choices=SHAPES, help="whose shape the images have")
    args = parser.parse_args()
    keep_memory()  # as `urrl train` does
    names = args.methods.split(",") if args.methods else [*METHODS, "urrl_paper"]
    contenders = {name: Contender(name, args.data) for name in ["supervised", *(n for n in names if n != "supervised")]}
    for contender in contenders.values():
        contender.whole()
        contender.bare()
    rounds = [{name: (timed(c.whole), timed(c.bare)) for name, c in contenders.items()} for _ in range(args.repeats)]

    print(
        f"{'':<12}{'learned':>9}{'looked at':>11}{'step':>10}{'to supervised':>15}{'to bare':>9}   (images of a step)"
    )
    figures: dict[str, float] = {}
    for name, contender in contenders.items():
        step = 1000 * statistics.median(r[name][0] for r in rounds)
        to_supervised = statistics.median(r[name][0] / r["supervised"][0] for r in rounds)
        to_bare = statistics.median(whole / bare for whole, bare in (r[name] for r in rounds))
        figures |= {f"{name}_to_supervised": round(to_supervised, 3), f"{name}_to_bare": round(to_bare, 3)}
        images = f"{contender.learned:>9}{contender.looked_at:>11}"
        print(f"{name:<12}{images}{step:>7.0f} ms{to_supervised:>15.2f}{to_bare:>9.2f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
