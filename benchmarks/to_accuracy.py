"""Validation accuracy against FLOPs and against minutes, of any runs, finished or not: a curve each.

python benchmarks/to_accuracy.py runs/a runs/b --out picture.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    figures = {}
    print(f"{'':<44}{'epochs':>7}{'minutes':>9}{'FLOPs':>10}{'validation':>12}")
    for folder in args.runs:
        config = json.loads((folder / "config.json").read_text())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        name = f"{config['method']}, {config['recipe']}, {config['dataset']} η={config['eta']} μ={config['mu']}"
        accuracy = [record["val_accuracy"] for record in records]
        axes[0].plot([record["flops"] for record in records], accuracy, ".-", label=name)
        axes[1].plot([record["seconds"] / 60 for record in records], accuracy, ".-", label=name)
        last = records[-1]
        figures[str(folder)] = {
            "flops": last["flops"],
            "seconds": last["seconds"],
            "val_accuracy": last["val_accuracy"],
        }
        cost = f"{last['seconds'] / 60:>9.1f}{last['flops']:>10.2g}"
        print(f"{name:<44}{len(records):>7}{cost}{last['val_accuracy']:>12.2%}")
    axes[0].set(xlabel="FLOPs (log)", ylabel="validation accuracy", xscale="log")
    axes[1].set(xlabel="minutes")
    for ax in axes:
        ax.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.savefig(args.out, dpi=110)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
