"""One user's seed, many independent streams of randomness."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *use: int | str) -> int:
    """A seed of its own for every (seed, use): no two uses draw the same numbers."""
    return int.from_bytes(hashlib.sha256(repr((seed, *use)).encode()).digest()[:6], "little")


def generator(seed: int, *use: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, *use))
