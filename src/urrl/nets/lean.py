"""The net of the fast recipe: a stem and three pairs of 3x3 convolutions. Each pair halves the image, by maxima; the
first, on the whole image, is narrow, since there a channel costs most. After cifar10-airbench (Jordan, 2024)."""

from __future__ import annotations

from torch import Tensor, nn


def convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """3x3; at first it hands its inputs on as they are, and mixes them in the channels that it has more."""
    layer = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(inputs, outputs), nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.GELU(),
        convolution(outputs, outputs), nn.BatchNorm2d(outputs), nn.GELU(),
    )  # fmt: skip


class LeanNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], width: int = 16):
        super().__init__()
        channels, side = shape[0], min(shape[1:])
        self.out_features = 8 * width
        stride = max(1, round(side / 32))  # what is larger than 32 pixels is made smaller at once
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 2 * stride, stride), nn.GELU())
        self.pairs = nn.Sequential(pair(width, width), pair(width, 4 * width), pair(4 * width, 8 * width))

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(self.stem(x)).amax((2, 3))  # (B, 8 width)
