"""A network = backbone + classifier f on its feature + unit-norm embedding q on the same feature."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from urrl.config import SMALLEST
from urrl.errors import UserError
from urrl.nets.fast import FastResNet
from urrl.nets.lean import LeanNet
from urrl.nets.mlp import MLP
from urrl.nets.preact_resnet import PreActResNet18


class Out(NamedTuple):
    logits: Tensor  # (B, C)
    q: Tensor  # (B, d), unit norm
    feature: Tensor  # (B, width) of the backbone, on which both stand


class Network(nn.Module):
    members: int = 1

    def __init__(self, backbone: nn.Module, n_classes: int, embed_dim: int, head: str):
        super().__init__()
        width: int = backbone.out_features  # type: ignore[assignment]
        self.backbone = backbone
        self.embed_dim = embed_dim
        self.classifier = nn.Linear(width, n_classes)
        if head == "linear":
            self.embed: nn.Module = nn.Linear(width, embed_dim)
        elif head == "mlp":
            self.embed = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, embed_dim))
        else:
            raise UserError(f"head {head!r} is unknown; there are: linear, mlp")

    def forward(self, x: Tensor, views: int = 1) -> Out:
        """x: of several views all rows of the first, then of the second, ..., which `Members` must know."""
        feature = self.backbone(x)  # (B, width)
        # NOTE: the paper writes f(q); the works it builds on put f on the backbone's feature, and so do we.
        return Out(self.classifier(feature), F.normalize(self.embed(feature).float(), dim=1), feature)

    def begin(self, x: Tensor) -> None:
        """Before training, and before any copy is made: a look at some items, for a backbone that begins with them."""
        if isinstance(self.backbone, LeanNet):
            self.backbone.begin(x)

    def settle(self) -> None:
        """After the first part of a run: what has learned enough by then stays as it is."""
        if isinstance(self.backbone, LeanNet):
            self.backbone.settle()


class Members(Network):
    """Several networks as one. They begin and learn apart: in training each has its own part of a batch's items. A
    prediction is the mean of theirs, embedding and feature all of theirs, side by side; in training the feature is
    that of a row's member alone."""

    def __init__(self, networks: list[Network]):
        nn.Module.__init__(self)
        self.networks = nn.ModuleList(networks)
        self.members = len(networks)
        self.embed_dim = sum(net.embed_dim for net in networks)

    def forward(self, x: Tensor, views: int = 1) -> Out:
        m, d = len(self.networks), self.embed_dim // len(self.networks)
        if not self.training:
            outs = [net(x) for net in self.networks]
            f = torch.stack([out.logits.float().softmax(1) for out in outs]).mean(0)
            q, feature = (torch.cat([out[i] for out in outs], 1) for i in (1, 2))
            return Out(f.clamp_min(1e-30).log(), q / math.sqrt(m), feature)
        # All views of an item go to one member.
        parts = zip(*(view.tensor_split(m) for view in x.tensor_split(views)))
        outs = [net(torch.cat(own)) for net, own in zip(self.networks, parts)]

        def in_order(own: list[Tensor]) -> Tensor:
            return torch.cat([rows for view in zip(*(t.tensor_split(views) for t in own)) for rows in view])

        # A row has one member's q in its place, so long that in the mean over the members it is the whole q.
        wide = [math.sqrt(m) * F.pad(out.q, (d * i, d * (m - 1 - i))) for i, out in enumerate(outs)]
        return Out(in_order([out.logits for out in outs]), in_order(wide), in_order([out.feature for out in outs]))

    def begin(self, x: Tensor) -> None:
        for net in self.networks:
            assert isinstance(net, Network)
            net.begin(x)

    def settle(self) -> None:
        for net in self.networks:
            assert isinstance(net, Network)
            net.settle()


NETS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {  # (shape of one item, width) -> backbone
    "preact": lambda shape, width: PreActResNet18(shape[0], width),
    "lean": LeanNet,
    "fast": FastResNet,
    "mlp": MLP,
}


def build_network(name: str, shape: tuple[int, ...], n_classes: int, width: int, embed_dim: int, head: str,
                  members: int = 1) -> Network:  # fmt: skip
    if name not in NETS:
        raise UserError(f"net {name!r} is unknown; there are: {', '.join(NETS)}")
    if (name == "mlp") != (len(shape) == 1):
        kind = "feature vectors" if len(shape) == 1 else "images"
        raise UserError(f"net {name!r} does not take {kind}; choose {'mlp' if len(shape) == 1 else 'fast'}")
    if name == "lean" and min(shape[1:]) < SMALLEST:
        raise UserError(f"net 'lean' takes images of at least {SMALLEST} pixels a side; choose fast")
    with torch.device("meta"):  # takes no memory
        one = Network(NETS[name](shape, width), n_classes, embed_dim, head)
        size = members * sum(4 * p.numel() for p in one.parameters())
    # Gradients and momentum take as much each.
    if hasattr(os, "sysconf") and 3 * size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise UserError(f"net {name} of width {width} and embed_dim {embed_dim} has {size / 1e9:.0f} GB, too much for "
                        "this machine")  # fmt: skip
    networks = [Network(NETS[name](shape, width), n_classes, embed_dim, head) for _ in range(members)]
    return Members(networks) if members > 1 else networks[0]
