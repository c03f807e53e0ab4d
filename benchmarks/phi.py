"""The automatic threshold phi="auto" of URRLClassifier against fixed ones, in three settings of two data sets.

    python benchmarks/phi.py --out docs/results/phi.json

Digits (1,437 training rows) and 2,500 images of Fashion-MNIST, both as plain features; in the form of the recipe `fast`
and, on digits, in the paper's form. A cell is done once it is in the file. One thread; one seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from urrl import URRLClassifier
from urrl.candidates import generate
from urrl.data import load
from urrl.files import write_json

SETTINGS = ((0.1, 0.3), (0.3, 0.3), (0.5, 0.5))
PAPER = {"start": "uniform", "vote": "labels", "one_view": "", "alpha": 8.0, "w_m": 5.0}
CASES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("digits", 1437, "fast", {}),
    ("digits", 1437, "paper", PAPER),
    ("fmnist", 2500, "fast", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name, n, form, options in CASES:
        data = load(name, args.data_dir if name != "digits" else None)
        order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:4000]
        x, y = data.x[order].flatten(1).numpy(), data.truth[order]
        for eta, mu in SETTINGS:
            S = generate(y[:n], len(data.classes), eta, mu, seed=0).mask.numpy()
            for phi in ("auto", 0.5, 0.7, 0.9):
                key = f"{name} {form} eta={eta} mu={mu} phi={phi}"
                if key not in done:
                    clf = URRLClassifier(phi=phi, random_state=0, options=options).fit(x[:n], S)
                    entered = clf.candidates_ & ~S
                    right = int(entered[np.arange(n), y[:n]].sum())
                    done[key] = {
                        "test_accuracy": clf.score(x[n:], y[n:]),
                        "label_accuracy": float((clf.transduction_ == y[:n].numpy()).mean()),
                        "entered": int(entered.sum()),
                        "entered_right": right / max(1, int(entered.sum())),
                    }
                    write_json(args.out, done)
                print(key, done[key], flush=True)


if __name__ == "__main__":
    main()
