"""The only reader of the truth: accuracies, and what became of the candidate sets. Nothing here trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl import distributed, interrupt
from urrl.data import Part
from urrl.data.augment import AnyPolicy, normalise
from urrl.data.stream import Items, rows_of
from urrl.labels import row_blocks
from urrl.likelihood import estimate_mu, set_log_likelihood
from urrl.methods import Method
from urrl.nets import Network, Out


@torch.no_grad()
def infer(net: Network, x: Items, policy: AnyPolicy, flip: bool = False, move: int = 0, batch: int = 256) -> Out:
    """`outputs` of all of x, to which every process does its share."""
    own = outputs(net, x[distributed.share(len(x))], policy, flip, move, batch)
    return Out(*distributed.gather(own, len(x)))


@torch.no_grad()
def outputs(net: Network, x: Items, policy: AnyPolicy, flip: bool = False, move: int = 0, batch: int = 256,
            turn: int | None = None) -> Out:  # fmt: skip
    """Of the network in eval mode for x, un-augmented, in order; with `flip` or `move`, log of the mean probability
    over `looks` in place of the logits, or the outputs for one of these looks, whose turn it is."""
    was_training = net.training
    net.eval()
    device = next(net.parameters()).device
    outs = []
    for part in rows_of(x, [slice(start, start + batch) for start in range(0, max(1, len(x)), batch)]):
        interrupt.check()
        views = normalise(part.to(device), policy)
        choice = looks(views, flip, move)
        if turn is not None:
            choice = [choice[turn % len(choice)]]
        seen = [(weight, net(look)) for weight, look in choice]
        out = seen[0][1]
        if len(seen) > 1:
            out = out._replace(logits=mean_probability(seen).log())
        outs.append([t.float() for t in out])
    net.train(was_training)
    return Out(*(torch.cat(parts) for parts in zip(*outs)))


def looks(x: Tensor, flip: bool, move: int) -> list[tuple[float, Tensor]]:
    """(weight, images) of all that a prediction for normalised images (n, ch, H, W) is the mean over: as they are,
    moved up-left and down-right at half the weight, and the mirror images of those."""
    views = [(1.0, x)]
    if move:
        h, w = x.shape[2:]
        wide = F.pad(x, (move,) * 4, "reflect")
        views = [(0.5, x), (0.25, wide[:, :, 2 * move :, 2 * move :]), (0.25, wide[:, :, :h, :w])]
    return [(weight / 2, look) for weight, view in views for look in (view, view.flip(3))] if flip else views


def mean_probability(seen: list[tuple[float, Out]]) -> Tensor:
    """(n, C), over outputs with weights that sum to 1."""
    return torch.stack([weight * out.logits.softmax(1) for weight, out in seen]).sum(0)


def accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1).cpu() == y).double().mean())


def part_accuracy(net: Network, part: Part, policy: AnyPolicy, flip: bool = False, move: int = 0) -> float | None:
    """None where nobody knows."""
    if part.y is None or not len(part):
        return None
    return accuracy(infer(net, part.x, policy, flip, move).logits, part.y)


def labelled_features(net: Network, part: Part, policy: AnyPolicy, n: int) -> tuple[Tensor, Tensor]:
    """The encoder's features of the first n items with their true classes, for a picture."""
    return infer(net, part.x[:n], policy).feature.cpu(), part.truth[:n]


def validation(net: Network, part: Part, policy: AnyPolicy) -> dict[str, float | None]:
    """What chooses the best epoch: the accuracy or, where the held-out rows have candidate sets of their own, those."""
    if part.S is None or not len(part):
        return {"val_accuracy": part_accuracy(net, part, policy)}  # one look at each: more would cost as much again
    logits = infer(net, part.x, policy).logits.cpu()
    known = None if part.y is None else accuracy(logits, part.y)
    return {"val_accuracy": known, **{f"val_{name}": v for name, v in set_scores(logits.softmax(1), part.S).items()}}


def set_scores(f: Tensor, S: Tensor) -> dict[str, float]:
    """How well predictions f (n, C) fit candidate sets that they have not seen, in three ways; rows that name every
    class say nothing and are left out.

    covering        share of the rows whose prediction is a candidate
    approximated    the prediction's probability among the candidates, 0 where it is none ("approximated accuracy" in
                    Wang et al., Realistic evaluation of deep partial-label learning algorithms, ICLR 2025)
    likelihood      of the sets, under the unreliable rate that fits them best: allows for sets that miss the truth
    """
    said = ~S.all(1)
    f, S = f[said], S[said]
    if not len(f):
        return {"covering": 1.0, "approximated": 1.0, "likelihood": 0.0}
    top, label = f.max(1)
    covered = S[torch.arange(len(S)), label]
    share = top / (f * S).sum(1).clamp_min(1e-12)
    return {
        "covering": float(covered.double().mean()),
        "approximated": float((covered * share).double().mean()),
        "likelihood": float(set_log_likelihood(f, S, estimate_mu(f, S))),
    }


def true_in_set(S: Tensor, y: Tensor) -> float:
    """Share of the candidate sets that hold the true label."""
    return float(S[torch.arange(len(y)), y].double().mean())


def label_report(method: Method, given: Tensor, y: Tensor | None) -> dict[str, Any]:
    """What the method made of its candidate sets, next to the truth where it is known. given: S as it came, (n, C)."""
    n_entered = right = in_set = correct = 0
    for rows in row_blocks(method.S):
        S, l, rows = method.S[rows].cpu(), method.l[rows].cpu(), rows.cpu()
        entered = S & ~given[rows]
        n_entered += int(entered.sum())
        if y is not None:
            truth = y[rows, None]
            right += int(entered.gather(1, truth).sum())
            in_set += int(S.gather(1, truth).sum())
            correct += int((l.argmax(1) == truth[:, 0]).sum())
    if y is None:
        unknown = ("corrected_precision", "true_in_set_before", "true_in_set_after", "label_accuracy")
        return {"corrected": n_entered, **dict.fromkeys(unknown)}
    return {
        "corrected": n_entered,
        "corrected_precision": right / n_entered if n_entered else None,
        "true_in_set_before": true_in_set(given, y),
        "true_in_set_after": in_set / len(y),
        "label_accuracy": correct / len(y),
    }
