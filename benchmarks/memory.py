"""Memory of URRL's state on CIFAR-100 size (n = 40,000, C = 100), beyond the network and the images.

The buffers are counted; the peak of one correction over rows that all need neighbours is measured as growth of the
process's peak resident memory.

    python benchmarks/memory.py [--n 40000] [--classes 100]
"""

from __future__ import annotations

import argparse
import json
import resource

import torch

from urrl.candidates import generate
from urrl.methods.urrl import URRL, URRLConfig, corrections, prototypes
from urrl.nets import build_network


def peak() -> float:
    """Peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=40_000)
    parser.add_argument("--classes", type=int, default=100)
    args = parser.parse_args()
    n, C, d = args.n, args.classes, 64
    torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # the libraries' own buffers
    before = peak()
    sets = generate(torch.arange(n) % C, C, 0.05, 0.3)
    method = URRL(build_network("fast", (3, 32, 32), C, 32, d, "linear"), sets, URRLConfig())
    buffers = sum(t.numel() * t.element_size() for t in (method.S, method.l, method.added, method.z)) / 2**20
    # The embeddings and outputs of one pass, then a correction in which every row is searched.
    q = torch.nn.functional.normalize(torch.randn(n, d), dim=1)
    f = torch.randn(n, C).mul_(2).softmax(1)
    prototypes(q, method.l)
    corrections(f, q, method.l, method.S, 200, 0.3, 0.3)
    figures = {"state_mb": buffers, "peak_growth_mb": peak() - before}
    for name, value in figures.items():
        print(f"{name:<16}{value:8.1f}")
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
