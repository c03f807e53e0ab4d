"""An untuned URRLClassifier against what one would do with scikit-learn alone, on small tables; and what a fit costs.

    python benchmarks/tables.py --data-dir TABLES --out docs/results/tables.json

Digits as 64 features with sets drawn at eta = 0.3, and the real sets lost, msrcv2 and birdsong; each as it is and with
mu = 0.3 injected (digits: the paper's convention; the others: the true label swapped for a non-candidate). Five folds;
test accuracy. Two models of scikit-learn that most people would try, trained on a random candidate of each set, or on
all candidates with weights 1/|S|. `clean` is the same model on the true labels, which nobody has. A cell is done once
it is in the file; an interrupted run goes on. One thread; seconds are CPU time.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler

from urrl import URRLClassifier
from urrl.candidates import generate
from urrl.data import load
from urrl.files import write_json

SETS = ("digits", "lost", "msrcv2", "birdsong")
FOLDS = 5


def table(name: str, mu: float, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, y, S)"""
    data = load(name, None if name == "digits" else data_dir)
    x, y = data.x.flatten(1).double().numpy(), data.truth.numpy()
    if data.S is None:
        return x, y, generate(data.truth, len(data.classes), 0.3, mu, seed=0).mask.numpy()
    S, rng = data.S.numpy().copy(), np.random.default_rng(0)
    for row in np.flatnonzero((rng.random(len(y)) < mu) & ~S.all(1)):
        into = rng.choice(np.flatnonzero(~S[row]))
        S[row, [y[row], into]] = False, True
    return x, y, S


def predict(name: str, x: np.ndarray, S: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> np.ndarray:
    if name == "urrl":
        return URRLClassifier(random_state=seed).fit(x, S).predict(new)
    kind, on = name.split()
    model: Any = RandomForestClassifier(random_state=seed) if kind == "forest" else LogisticRegression(max_iter=300)
    scale = StandardScaler().fit(x)
    x, new = scale.transform(x), scale.transform(new)
    if on == "all":
        row, label = S.nonzero()
        return model.fit(x[row], label, 1 / S.sum(1)[row]).predict(new)
    if on == "random":
        y = (S * np.random.default_rng(seed).random(S.shape)).argmax(1)
    return model.fit(x, y).predict(new)


MODELS = ("urrl", *(f"{kind} {on}" for kind in ("forest", "logistic") for on in ("random", "all", "clean")))


def cost() -> dict[str, float]:
    """Of a fit on (10,000 x 64) features, ten classes; and of predictions."""
    rng = np.random.default_rng(0)
    y = np.arange(10_000) % 10
    x = 2 * rng.normal(size=(10, 64))[y] + 3 * rng.normal(size=(10_000, 64))
    S = generate(torch.from_numpy(y), 10, 0.3, 0.3, seed=0).mask.numpy()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    clf = URRLClassifier(random_state=0).fit(x, S)
    fitted = time.process_time()
    for _ in range(5):
        clf.predict(x)
    predicted = (time.process_time() - fitted) / 5
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "fit_seconds": round(fitted - began, 1),
        "epochs": len(clf.history_),
        "predictions_per_second": round(len(x) / predicted),
        "peak_memory_above_import_mb": round(more / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    if "cost" not in done:  # first: peak memory is the process's own
        done["cost"] = cost()
        write_json(args.out, done)
    print(done["cost"], flush=True)
    for name in args.sets:
        for mu in (0.0, 0.3):
            x, y, S = table(name, mu, args.data_dir)
            for model in MODELS:
                key = f"{name} mu={mu} {model}"
                if key not in done:
                    began = time.process_time()
                    scores = []
                    for seed, (old, new) in enumerate(KFold(FOLDS, shuffle=True, random_state=0).split(x)):
                        guess = predict(model, x[old], S[old], y[old], x[new], seed)
                        scores.append(round(float((guess == y[new]).mean()), 4))
                    done[key] = {"accuracy": scores, "seconds": round((time.process_time() - began) / FOLDS, 1)}
                    write_json(args.out, done)
                mean, std = 100 * np.mean(done[key]["accuracy"]), 100 * np.std(done[key]["accuracy"], ddof=1)
                print(f"{key:<32} {mean:5.1f} ± {std:.1f}   {done[key]['seconds']} s a fit", flush=True)


if __name__ == "__main__":
    main()
