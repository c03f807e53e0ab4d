"""Which criterion without clean labels picks the best epoch: test accuracy at the epoch that each of them picks.

    python benchmarks/selection.py --data-dir TABLES --out docs/results/selection.json

URRL on four tables (see benchmarks/tables.py), a fifth for the test, a tenth of the rest held out with its sets. `last`
looks at nothing; `best` looks at the test, which nobody can. A cell is done once it is in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tables import SETS, table

from urrl.data import Part
from urrl.data.augment import find_policy
from urrl.data.own import from_arrays
from urrl.evaluate import part_accuracy, validation
from urrl.files import write_json
from urrl.nets import Network
from urrl.progress import Progress
from urrl.run import build_method, make_own_run
from urrl.train import fit

CRITERIA = ("covering", "approximated", "likelihood")


def curves(name: str, mu: float, seed: int, data_dir: Path | None) -> list[dict[str, Any]]:
    x, y, S = (torch.from_numpy(a) for a in table(name, mu, data_dir))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    new, old = order.tensor_split((len(x) // 5,))
    data = from_arrays(x[old], S[old], range(S.shape[1]))
    run, splits, given = make_own_run(data, "urrl", {"adapt": True}, seed)
    policy = find_policy(data.augment)
    method = build_method(run, splits.train.x, policy, given, "cpu")
    test = Part(x[new], y[new], new)

    def examine(net: Network) -> dict[str, Any]:
        return {**validation(net, splits.val, policy), "test": part_accuracy(net, test, policy)}

    return fit(method, splits.train.x, policy, run.training, seed, examine, None, False, Progress(True)).history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for seed in range(args.seeds):
        for name in SETS:
            for mu in (0.0, 0.3):
                key = f"{name} mu={mu} seed={seed}"
                if key in done:
                    continue
                history = curves(name, mu, seed, args.data_dir)
                tests = [record["test"] for record in history]
                picked = {c: max(history, key=lambda r: (r[f"val_{c}"], r["epoch"]))["epoch"] for c in CRITERIA}
                done[key] = {
                    "epochs": len(history),
                    "picked": picked,
                    "test": {"last": tests[-1], **{c: tests[e] for c, e in picked.items()}, "best": max(tests)},
                }
                write_json(args.out, done)
                print(key, done[key], flush=True)
    for c in ("last", *CRITERIA, "best"):
        print(f"{c:<14} {100 * sum(cell['test'][c] for cell in done.values()) / len(done):.2f}")


if __name__ == "__main__":
    main()
