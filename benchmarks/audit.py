"""How well the audit ranks the candidate sets that miss the true label, beside cleanlab with the same probabilities.

    python benchmarks/audit.py RUN [RUN ...] --out FILE.json

Each RUN is a finished run on data whose true labels are known. cleanlab knows single labels alone: it is given the
likeliest label of each set, and judged by its quality scores, worst first, and by what find_label_issues names. Both
see the same probabilities, of the network for its own training items (cleanlab asks for those of items that it was not
trained on); the audit sees the neighbours and the sizes of the sets too. cleanlab is installed for this comparison
only (pip install cleanlab); without it only our own figures are measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from urrl.audit import audit_run, suspects
from urrl.candidates import CandidateSets
from urrl.data import load, split
from urrl.evaluate import infer
from urrl.files import write_json
from urrl.predict import load_model

try:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
except ImportError:
    find_label_issues = None


def figures(score: np.ndarray, missing: np.ndarray) -> dict[str, float]:
    """score: higher is worse."""
    order = np.argsort(-score, kind="stable")
    return {
        "average_precision": round(float(average_precision_score(missing, score)), 4),
        "precision_at_1_percent": round(float(missing[order[: max(1, len(order) // 100)]].mean()), 4),
    }


def measure(folder: Path, data_dir: Path | None) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    part = split(load(config["dataset"], data_dir), config["split"], config["seed"], config["subset"]).train
    given = CandidateSets.load(folder / "candidates.npz").mask
    missing = ~given[torch.arange(len(given)), part.truth].numpy()
    issues = audit_run(folder, data_dir, "cpu").issues
    named = suspects(issues).index
    record: dict[str, Any] = {key: config[key] for key in ("dataset", "eta", "mu", "method", "seed", "subset")}
    record |= {"epochs": config["training"]["epochs"], "items": len(missing), "missing": int(missing.sum())}
    record["audit"] = figures(issues["evidence"].sort_index().to_numpy(), missing)
    record["audit"] |= _found(missing[named], missing)
    if find_label_issues is not None:
        net, training, policy, _, _ = load_model(folder, "cpu")
        f = infer(net, part.x, policy, training.flip_test, training.move_test).logits.double().softmax(1)
        label, p = (f * given).argmax(1).numpy(), f.numpy()
        for method in ("self_confidence", "normalized_margin"):
            record[f"cleanlab {method}"] = figures(-get_label_quality_scores(label, p, method=method), missing)
        found = find_label_issues(label, p, return_indices_ranked_by="self_confidence", n_jobs=1)
        record["cleanlab find_label_issues"] = _found(missing[found], missing)
    return record


def _found(right: np.ndarray, missing: np.ndarray) -> dict[str, Any]:
    precision = round(float(right.mean()), 4) if len(right) else None
    return {"named": len(right), "precision": precision, "recall": round(float(right.sum() / missing.sum()), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    records = []
    for folder in args.runs:
        record = measure(folder, args.data_dir)
        records.append(record)
        print(folder, json.dumps(record))
    write_json(args.out, records)


if __name__ == "__main__":
    main()
