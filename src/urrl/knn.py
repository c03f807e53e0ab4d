"""Nearest neighbours by cosine, among unit vectors: exact, and by an index where that would take too long."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.distributed import everyone, pieces, share, total, world

EXACT = 300_000**2  # pairs compared, beyond which a CPU asks faiss, if it is installed
BUFFER = 2**23  # scores held at once, in numbers: 32 MB
GROUP = 16
CHUNK = 2**10  # rows of neighbours: what is made of them is large where classes are many


def cosine_topk(q: Tensor, k: int, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The k nearest of all q (n, d) for each of the rows (all by default), self excluded by index.

    Yields (rows, similarity, neighbour) in chunks, (b,), (b, k) and (b, k), so that no (n, n) matrix ever exists.
    The order of the k is not defined. Where n - 1 < k there are n - 1 neighbours.

    Of several processes each has its share of q and asks for rows of that, all of them at the same time; neighbours are
    numbers among all. The vectors of the others pass by in pieces.
    """
    n = total(len(q))
    k = min(k, n - 1)
    rows = torch.arange(len(q), device=q.device) if rows is None else rows
    if n * total(len(rows)) > EXACT and q.device.type == "cpu" and find_spec("faiss"):
        start = share(n).start  # the index is of all, and so holds all
        for part, similarity, neighbour in indexed_topk(everyone(q), k, start + rows):
            yield part - start, similarity, neighbour
    elif world() == 1:
        yield from _exact(q, k, rows, q, 0)
    else:
        best, nearest = q.new_empty(len(rows), 0), rows.new_empty(len(rows), 0)
        for first, others in pieces(q, n):
            found = list(_exact(q, k, rows, others, share(n).start - first))
            best = torch.cat([best, torch.cat([s for _, s, _ in found])], 1)
            nearest = torch.cat([nearest, torch.cat([first + i for _, _, i in found])], 1)
            if best.shape[1] > k:
                best, place = best.topk(k, dim=1, sorted=False)
                nearest = nearest.gather(1, place)
        yield from zip(*(t.split(CHUNK) for t in (rows, best, nearest)))


def _exact(q: Tensor, k: int, rows: Tensor, others: Tensor, ahead: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Among others (m, d), of which row r of q is number r + ahead, if it is one of them."""
    m = len(others)
    columns = F.pad(others, (0, 0, 0, -m % GROUP)).T  # (d, m rounded up to whole groups)
    chunk = max(1, BUFFER // columns.shape[1])
    scores = q.new_empty(min(chunk, len(rows)), columns.shape[1])  # once: a fresh one per chunk costs a third more
    for part in rows.split(chunk):
        s = scores[: len(part)]
        torch.matmul(q[part], columns, out=s)
        s[:, m:] = -torch.inf
        itself = part + ahead
        there = ((itself >= 0) & (itself < m)).nonzero().squeeze(1)
        s[there, itself[there]] = -torch.inf
        yield part, *_topk(s, min(k, m))


def indexed_topk(q: Tensor, k: int, rows: Tensor, share: int = 64) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same from faiss's inverted file: about 4 sqrt(n) cells, of which a row looks into one in `share`, but into 16
    at least and into as many as hold 8 k others. What lies beyond is missed: see benchmarks/knn_scaling.py."""
    import faiss

    n, d = q.shape
    faiss.omp_set_num_threads(torch.get_num_threads())
    vectors = q.float().contiguous().numpy()
    cells = max(1, min(int(4 * n**0.5), n // 40))  # k-means wants some 40 vectors a cell
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, cells, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, n // (64 * cells))])
    index.add(vectors)
    index.nprobe = min(cells, max(16, cells // share, 8 * k * cells // n))
    for part in rows.split(CHUNK):
        similarity, neighbour = (torch.from_numpy(t) for t in index.search(vectors[part.numpy()], k + 1))
        itself = neighbour == part[:, None]
        itself[~itself.any(1), -1] = True  # not among its own nearest: one too many was found
        short = (neighbour < 0).any(1).nonzero().squeeze(1)  # cells too small for k
        similarity, neighbour = (t[~itself].view(len(part), k) for t in (similarity, neighbour))
        for row in short.tolist():
            _, similarity[row : row + 1], neighbour[row : row + 1] = next(_exact(q, k, part[row : row + 1], q, 0))
        yield part, similarity, neighbour


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
    columns = (best[:, None] + torch.arange(0, m, groups, device=s.device)[:, None]).view(b, GROUP * k)
    values, place = s.gather(1, columns).topk(k, dim=1, sorted=False)
    return values, columns.gather(1, place)
