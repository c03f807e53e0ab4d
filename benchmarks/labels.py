"""Candidate sets and label distributions at the size of ImageNet: n = 1.28 million items, C = 1,000 classes.

Makes the sparse state, runs a refine and a correction over all rows, and prints seconds and memory. The items are unit
vectors about C directions, the network's outputs softmax(12 q . directions), made as they are asked for: what is
measured is the labels' memory, not that of an (n, C) matrix of outputs.

    python benchmarks/labels.py [--n 1280000] [--classes 1000] [--size 20] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from knn_scaling import peak

from urrl.functional import renormalise_on
from urrl.labels import SparseLabels
from urrl.methods.urrl import corrections, prototypes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_280_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=20, help="mean size of a set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    n, C, d, k, tau, phi, mu = args.n, args.classes, 64, 200, 0.3, 0.7, 0.3
    rng = torch.Generator().manual_seed(0)
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[name] = round(now - began, 1)
        print(f"{name:<12}{seconds[name]:8.1f} s   peak {peak():8.0f} MB", flush=True)
        began = now

    before = peak()
    y = torch.arange(n) % C
    wrong = torch.rand(n, generator=rng) < mu
    recorded = torch.where(wrong, (y + torch.randint(1, C, (n,), generator=rng)) % C, y)

    def mask(rows: torch.Tensor) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(int(rows[0]))
        S = torch.rand(len(rows), C, generator=drawn) < args.size / C
        return S.scatter_(1, recorded[rows, None], True)

    kept = SparseLabels(mask(rows) for rows in torch.arange(n).split(2**14))
    lap("make")
    state = sum(t.numel() * t.element_size() for t in kept.buffers()) / 2**20
    centres = F.normalize(torch.randn(C, d, generator=rng), dim=1)
    spread = (F.normalize(torch.randn(len(part), d, generator=rng), dim=1) for part in y.split(2**16))
    q = torch.cat([F.normalize(centres[part] + 0.6 * away, dim=1) for part, away in zip(y.split(2**16), spread)])

    class Outputs:
        """f of any rows: softmax(q W)."""

        def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
            return (12 * q[rows] @ centres.T).softmax(1)

    f = Outputs()
    for rows in torch.arange(n).split(8192):
        kept.l[rows] = renormalise_on(kept.S[rows], f[rows])
    lap("refine")
    prototypes(q, kept.l)
    lap("prototypes")
    rows, labels, share = corrections(f, q, kept.l, kept.S, k, tau, phi)  # type: ignore[arg-type]
    lap("correct")
    kept.enter(rows, labels, share, 0)
    lap("enter")
    figures = {
        "n": n,
        "classes": C,
        "mean_size": round(len(kept.column) / n, 2),
        "state_mb": round(state),
        "dense_mb": round(n * C * 7 / 2**20),
        "peak_growth_mb": round(peak() - before),
        "entered": len(rows),
        "right": int((labels == y[rows]).sum()),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
    }
    print(json.dumps(figures))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
