"""Exact nearest neighbours by cosine, among unit vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BUFFER = 2**23  # scores held at once, in numbers: 32 MB


def cosine_topk(q: Tensor, k: int, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The k nearest of all q (n, d) for each of the rows (all by default), self excluded by index.

    Yields (rows, similarity, neighbour) in chunks, (b,), (b, k) and (b, k), so that no (n, n) matrix ever exists.
    The order of the k is not defined. Where n - 1 < k there are n - 1 neighbours.
    """
    n = len(q)
    k = min(k, n - 1)
    rows = torch.arange(n, device=q.device) if rows is None else rows
    chunk = max(1, BUFFER // n)
    scores = q.new_empty(min(chunk, len(rows)), n)  # allocated once: a fresh one per chunk costs a third more
    for part in rows.split(chunk):
        s = scores[: len(part)]
        torch.matmul(q[part], q.T, out=s)
        s[torch.arange(len(part), device=q.device), part] = -torch.inf
        similarity, neighbour = s.topk(k, dim=1, sorted=False)
        yield part, similarity, neighbour
