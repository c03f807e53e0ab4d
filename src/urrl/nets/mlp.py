"""Two hidden layers with batch normalisation, for feature vectors."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, shape: tuple[int, ...], width: int = 256):
        super().__init__()
        self.out_features = width
        layers: list[nn.Module] = []
        for inputs in (shape[0], width):
            layers += [nn.Linear(inputs, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
