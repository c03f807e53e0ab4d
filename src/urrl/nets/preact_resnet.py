"""PreAct ResNet-18 (He et al. 2016, identity mappings), for small images: 3x3 stem, no pooling before the end."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PreActBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        same = stride == 1 and inputs == width
        self.stride = stride
        self.shortcut = None if same else nn.Conv2d(inputs, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        # The stride is taken here, and not by the 1x1 convolution: the backward pass of such a one, with few channels,
        # writes past its memory on CPUs without AVX-512 (torch 2.13.0, oneDNN 3.12.0).
        skip = x if self.shortcut is None else self.shortcut(h[:, :, :: self.stride, :: self.stride])
        h = self.conv1(h)
        h = self.conv2(F.relu(self.bn2(h)))
        return h + skip


class PreActResNet18(nn.Module):
    def __init__(self, channels: int, width: int = 64):
        super().__init__()
        self.out_features = 8 * width
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [PreActBlock(inputs, outputs, 1 if stage == 0 else 2), PreActBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.blocks(self.stem(x)))).mean((2, 3))  # (B, 8 width)
