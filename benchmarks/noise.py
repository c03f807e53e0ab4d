"""How well the estimated unreliable and partial rates are calibrated: nine settings of Fashion-MNIST, 3,000 images.

    python benchmarks/noise.py --out docs/results/noise.json

Two kinds of predictions that have not seen the sets they are held against: `vote`, each item's neighbours (all rows,
seconds: what `URRLClassifier` keeps in `noise_`), and `network`, an untuned URRLClassifier on the pixels as features,
trained on five sixths of the rows and held against the rest. A cell is done once it is in the file; an interrupted run
goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from urrl import URRLClassifier
from urrl.candidates import generate
from urrl.data import load
from urrl.evaluate import true_in_set
from urrl.files import write_json
from urrl.noise import Noise, estimate_noise, noise_by_vote

RATES = (0.1, 0.3, 0.5)
LEVEL = 0.9


def measure(kind: str, x: torch.Tensor, S: torch.Tensor, seed: int) -> Noise:
    if kind == "vote":
        noise = noise_by_vote(x, S)
        assert noise is not None
        return noise
    held = len(x) // 6
    features = x.flatten(1).numpy()
    clf = URRLClassifier(random_state=seed).fit(features[held:], S[held:].numpy())
    return estimate_noise(torch.from_numpy(clf.predict_proba(features[:held])).float(), S[:held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3, help="of the votes; the network is trained for the first alone")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    dataset = load("fmnist", args.data_dir)
    for kind in ("vote", "network"):
        for seed in range(args.seeds if kind == "vote" else 1):
            rows = torch.randperm(len(dataset.x), generator=torch.Generator().manual_seed(seed))[: args.items]
            for eta in RATES:
                for mu in RATES:
                    key = f"{kind} eta={eta} mu={mu} seed={seed}"
                    if key in done:
                        continue
                    y = dataset.truth[rows]
                    S = generate(y, 10, eta, mu, seed=seed).mask
                    noise = measure(kind, dataset.x[rows], S, seed)
                    done[key] = {"missing_truth": 1 - true_in_set(S, y), **noise._asdict()}
                    write_json(args.out, done)
                    print(key, done[key], flush=True)
    for kind in ("vote", "network"):
        cells = [(key, cell) for key, cell in done.items() if key.startswith(kind)]
        held = {"mu": 0, "eta": 0, "missing": 0}
        off = dict.fromkeys(held, 0.0)
        for key, cell in cells:
            true = {name: float(value) for name, value in (word.split("=") for word in key.split()[1:])}
            true["missing"] = cell["missing_truth"]
            for name in held:
                value, low, high = cell[name]
                held[name] += low <= true[name] <= high
                off[name] += abs(value - true[name]) / len(cells)
        print(f"{kind}: of {len(cells)} cells, the {LEVEL:.0%} interval holds the truth in {held}; mean error {off}")


if __name__ == "__main__":
    main()
