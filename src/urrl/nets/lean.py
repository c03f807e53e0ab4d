"""The net of the fast recipe: a stem that whitens patches and three pairs of 3x3 convolutions. The first of a pair
halves the image, by maxima, the second adds to what it has; the first pair, on the whole image, is narrow, since there
a channel costs most. After cifar10-airbench (Jordan, 2024), whose second convolutions do not add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 1024  # numbers of a patch: the directions of larger ones would take longer to find than they save


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)


class Pair(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        halving = convolution(inputs, outputs)
        # At first it hands its inputs on as they are, and mixes them in the channels that it has more.
        nn.init.dirac_(halving.weight.data[:inputs])
        self.halve = nn.Sequential(halving, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.GELU())
        self.add = nn.Sequential(convolution(outputs, outputs), nn.BatchNorm2d(outputs), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.halve(x)
        return x + self.add(x)


class LeanNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], width: int = 16):
        super().__init__()
        channels, side = shape[0], min(shape[1:])
        self.out_features = 8 * width
        stride = max(1, round(side / 32))  # what is larger than 32 pixels is made smaller at once
        kernel = max(2 * stride, 3 if channels == 1 else 2)  # grey: nine directions for the stem's channels, not four
        stem = min(width, 2 * channels * kernel**2)
        self.stem = nn.Sequential(nn.Conv2d(channels, stem, kernel, stride), nn.GELU())
        self.pairs = nn.Sequential(Pair(stem, width), Pair(width, 4 * width), Pair(4 * width, 8 * width))

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(self.stem(x)).amax((2, 3))  # (B, 8 width)

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """The stem becomes the main directions of patches of x (n, ch, H, W), of equal variance, each with both signs;
        its filters stay so, its biases learn. On very large patches it begins at random, and learns."""
        stem = self.stem[0]
        assert isinstance(stem, nn.Conv2d)
        kernel = stem.kernel_size[0]
        if stem.weight[0].numel() > LARGEST:
            return
        patches = F.unfold(x.contiguous(), kernel, stride=kernel).transpose(1, 2).flatten(0, 1)  # (many, ch k k)
        variance, axes = torch.linalg.eigh(patches.T.double() @ patches.double() / len(patches))
        filters = (axes / (variance + 5e-4).sqrt()).T.flip(0)[: (len(stem.weight) + 1) // 2]  # flat patches stay small
        both = torch.cat([filters, -filters])[: len(stem.weight)]
        stem.weight.copy_(both.view_as(stem.weight))
        stem.weight.requires_grad_(False)
        assert stem.bias is not None
        stem.bias.zero_()

    def settle(self) -> None:
        """A stem of main directions learns no more: nothing flows back to the whole image, where a step is dearest."""
        self.stem.requires_grad_(self.get_parameter("stem.0.weight").requires_grad)
