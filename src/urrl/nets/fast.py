"""A small residual net for CPUs: a strided stem, then three residual blocks that double the width and halve
the image. A 28x28 image costs 0.061 GFLOP forward and backward at width 32, 1/45 of PreAct ResNet-18."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = conv_bn(inputs, outputs, 3, stride, 1)
        self.second = conv_bn(outputs, outputs, 3, 1, 1)
        same = stride == 1 and inputs == outputs
        self.stride = stride
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        # Not by a stride of the 1x1 convolution: see PreActBlock.
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x[:, :, :: self.stride, :: self.stride]))


class FastResNet(nn.Module):
    def __init__(self, shape: tuple[int, ...], width: int = 32):
        super().__init__()
        self.out_features = 4 * width
        small = min(shape[1:]) < 16  # a stride in the stem would leave nothing of an 8x8 digit
        self.stem = conv_bn(shape[0], width, 3, 1, 1) if small else conv_bn(shape[0], width, 4, 2, 1)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(F.relu(self.stem(x))).mean((2, 3))  # (B, 4 width)
