"""Neighbours among n = 10,000 to 1,000,000 synthetic unit vectors: time, memory and recall, exact and by the index.

The vectors lie about 1,000 directions as the embeddings of a trained network do; with --uniform anywhere, the worst
case of an index. Every row is searched; where the exact search would take longer than a minute, it is timed on fewer
rows and scaled up ("estimated"). Recall is the share of the exact neighbours that the index finds, over 1,000 rows.

    python benchmarks/knn_scaling.py [--n 10000 100000 1000000] [--d 64] [--k 200] [--uniform] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from urrl.knn import cosine_topk, indexed_topk


def vectors(n: int, d: int, uniform: bool) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    spread = torch.randn(n, d, generator=rng)
    if uniform:
        return F.normalize(spread, dim=1)
    centres = F.normalize(torch.randn(1000, d, generator=rng), dim=1)
    return F.normalize(centres[torch.arange(n) % 1000] + 0.6 * F.normalize(spread, dim=1), dim=1)


def peak() -> float:
    """Peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, n: int, d: int, k: int, uniform: bool) -> dict[str, Any]:
    """Runs in a process of its own, so that the peak of the memory is its own too."""
    q = vectors(n, d, uniform)
    before = peak()
    rows = torch.arange(n)
    some = rows[:: max(1, n // 1000)][:1000]
    if kind == "exact":
        began = time.perf_counter()
        for _ in cosine_topk(q, k, some):
            pass
        took = time.perf_counter() - began
        whole = took * n / len(some) < 60
        if whole:
            began = time.perf_counter()
            for _ in cosine_topk(q, k, rows):
                pass
            took, some = time.perf_counter() - began, rows
        return {"seconds": took * n / len(some), "estimated": not whole, "growth_mb": peak() - before, "recall": 1.0}
    began = time.perf_counter()
    found = [near[(row % max(1, n // 1000) == 0)] for row, _, near in indexed_topk(q, k, rows)]
    took = time.perf_counter() - began
    growth = peak() - before
    near = torch.cat(found)[:1000]
    exact = torch.cat([neighbour for _, _, neighbour in cosine_topk(q, k, some)])
    recall = sum(len(set(a) & set(b)) for a, b in zip(near.tolist(), exact.tolist())) / exact.numel()
    return {"seconds": took, "estimated": False, "growth_mb": growth, "recall": recall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--k", type=int, default=200)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'n':>9} {'way':<6} {'seconds':>9} {'growth MB':>10} {'recall':>7}")
    for n in args.n:
        for kind in ("exact", "index"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (kind, n, args.d, args.k, args.uniform))
            rows.append({"n": n, "way": kind, **{key: round(value, 3) for key, value in row.items()}})
            mark = " estimated" if row["estimated"] else ""
            print(
                f"{n:>9} {kind:<6} {row['seconds']:>9.1f} {row['growth_mb']:>10.0f} {row['recall']:>7.3f}{mark}",
                flush=True,
            )
    if args.out:
        head = {"d": args.d, "k": args.k, "uniform": args.uniform, "threads": torch.get_num_threads()}
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
