"""Validation accuracy against FLOPs and against minutes, of any runs, finished or not: a curve each.

python benchmarks/to_accuracy.py runs/a runs/b --out picture.png

The curves are also written beside the picture, as picture.json, which can be given in place of runs: a run that takes
hours is drawn beside new ones without being run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

from urrl.train import read_history

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KEPT = ("flops", "seconds", "val_accuracy")


def curve_of(folder: Path) -> dict[str, Any]:
    """Of a run: its title and a list, an epoch each, of everything KEPT."""
    config = json.loads((folder / "config.json").read_text())
    records = read_history(folder, print)
    if not records:
        raise SystemExit(f"{folder}: no epoch is finished yet")
    title = f"{config['method']}, {config['recipe']}, {config['dataset']} η={config['eta']} μ={config['mu']}"
    return {"title": title, **{key: [record[key] for record in records] for key in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder, or curves that were written")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    curves: list[dict[str, Any]] = []
    for path in args.runs:
        curves += [curve_of(path)] if path.is_dir() else json.loads(path.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    print(f"{'':<44}{'epochs':>7}{'minutes':>9}{'FLOPs':>10}{'validation':>12}")
    for curve in curves:
        accuracy, minutes = curve["val_accuracy"], [seconds / 60 for seconds in curve["seconds"]]
        axes[0].plot(curve["flops"], accuracy, ".-", label=curve["title"])
        axes[1].plot(minutes, accuracy, ".-", label=curve["title"])
        cost = f"{minutes[-1]:>9.1f}{curve['flops'][-1]:>10.2g}"
        print(f"{curve['title']:<44}{len(accuracy):>7}{cost}{accuracy[-1]:>12.2%}")
    axes[0].set(xlabel="FLOPs (log)", ylabel="validation accuracy", xscale="log")
    axes[1].set(xlabel="minutes")
    for ax in axes:
        ax.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(args.out, dpi=110)
    args.out.with_suffix(".json").write_text("[\n" + ",\n".join(map(json.dumps, curves)) + "\n]\n")


if __name__ == "__main__":
    main()
