"""The only reader of the truth: accuracies, and what became of the candidate sets. Nothing here trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from urrl.data import Part
from urrl.data.augment import Policy, normalise
from urrl.methods import Method
from urrl.nets import Network, Out


@torch.no_grad()
def infer(net: Network, x: Tensor, policy: Policy, flip: bool = False, batch: int = 1000) -> Out:
    """Outputs for all of x, eval mode, un-augmented, in order; with `flip`, log of the mean probability over
    the image and its mirror image in place of the logits."""
    was_training = net.training
    net.eval()
    device = next(net.parameters()).device
    outs = []
    for part in x.split(batch):
        views = normalise(part.to(device), policy)
        out = net(views)
        if flip:
            mirrored = net(views.flip(3)).logits
            out = out._replace(logits=(out.logits.softmax(1) + mirrored.softmax(1)).div(2).log())
        outs.append(Out(*(t.float() for t in out)))
    net.train(was_training)
    return Out(*(torch.cat(parts) for parts in zip(*outs)))


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1).cpu() == y).double().mean())


def part_accuracy(net: Network, part: Part, policy: Policy, flip: bool) -> float:
    return accuracy(infer(net, part.x, policy, flip).logits, part.y)


def true_in_set(S: Tensor, y: Tensor) -> float:
    """Share of the candidate sets that hold the true label."""
    return float(S[torch.arange(len(y)), y].double().mean())


def label_report(method: Method, given: Tensor, y: Tensor) -> dict[str, Any]:
    """What the method made of its candidate sets, next to the truth. given: S as it came, (n, C)."""
    rows = torch.arange(len(y))
    S, l = method.S.cpu(), method.l.cpu()
    entered = S & ~given
    n_entered = int(entered.sum())
    right = int(entered[rows, y].sum())
    return {
        "corrected": n_entered,
        "corrected_precision": right / n_entered if n_entered else None,
        "true_in_set_before": true_in_set(given, y),
        "true_in_set_after": true_in_set(S, y),
        "label_accuracy": float((l.argmax(1) == y).double().mean()),
    }
