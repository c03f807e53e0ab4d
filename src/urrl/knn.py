"""Exact nearest neighbours by cosine, among unit vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BUFFER = 2**23  # scores held at once, in numbers: 32 MB
GROUP = 16


def cosine_topk(q: Tensor, k: int, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The k nearest of all q (n, d) for each of the rows (all by default), self excluded by index.

    Yields (rows, similarity, neighbour) in chunks, (b,), (b, k) and (b, k), so that no (n, n) matrix ever exists.
    The order of the k is not defined. Where n - 1 < k there are n - 1 neighbours.
    """
    n = len(q)
    k = min(k, n - 1)
    rows = torch.arange(n, device=q.device) if rows is None else rows
    others = F.pad(q, (0, 0, 0, -n % GROUP)).T  # (d, n rounded up to whole groups)
    chunk = max(1, BUFFER // others.shape[1])
    scores = q.new_empty(min(chunk, len(rows)), others.shape[1])  # once: a fresh one per chunk costs a third more
    for part in rows.split(chunk):
        s = scores[: len(part)]
        torch.matmul(q[part], others, out=s)
        s[:, n:] = -torch.inf
        s[torch.arange(len(part), device=q.device), part] = -torch.inf
        yield part, *_topk(s, k)


def _topk(s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of s (b, m) and their columns, twice as fast as topk on long rows.

    The k largest lie in the k groups with the largest maxima: a group outside those has k maxima above all it holds.
    """
    b, m = s.shape
    groups = m // GROUP
    if groups < 4 * k:
        return s.topk(k, dim=1, sorted=False)
    best = (
        s.view(b, GROUP, groups).amax(1).topk(k, dim=1, sorted=False).indices
    )  # (b, k): group g has g, g + groups ...
    columns = (best[:, None] + torch.arange(0, m, groups, device=s.device)[:, None]).view(b, -1)  # (b, GROUP k)
    values, place = s.gather(1, columns).topk(k, dim=1, sorted=False)
    return values, columns.gather(1, place)
