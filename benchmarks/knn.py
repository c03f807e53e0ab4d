"""Exact neighbours against faiss's flat index: the same vectors, threads and K, interleaved.

python benchmarks/knn.py [--n 46666] [--d 64] [--k 200] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from urrl.knn import cosine_topk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 46_666), ("d", 64), ("k", 200), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    q = torch.nn.functional.normalize(torch.randn(args.n, args.d, generator=torch.Generator().manual_seed(0)), dim=1)
    ours, theirs = [], []
    for _ in range(args.repeats):
        began = time.perf_counter()
        found = torch.cat([neighbour for _, _, neighbour in cosine_topk(q, args.k)])
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        index = faiss.IndexFlatIP(args.d)
        index.add(q.numpy())
        reference = index.search(q.numpy(), args.k + 1)[1]
        theirs.append(time.perf_counter() - began)
    rows = range(0, args.n, max(1, args.n // 200))
    same = [len(set(found[i].tolist()) & (set(reference[i].tolist()) - {i})) / args.k for i in rows]
    figures = {
        "knn_seconds": statistics.median(ours),
        "faiss_seconds": statistics.median(theirs),
        "knn_ratio": statistics.median(a / b for a, b in zip(ours, theirs)),
        "agreement": statistics.mean(same),
    }
    for name, value in figures.items():
        print(f"{name:<16}{value:8.3f}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
