"""Predictions of a finished run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from urrl import checkpoint
from urrl.config import Training, build
from urrl.data.augment import AnyPolicy, find_policy
from urrl.errors import UserError
from urrl.evaluate import infer
from urrl.files import write_atomic
from urrl.nets import Network, build_network
from urrl.progress import bar
from urrl.run import pick_device


def load_model(folder: Path, device: str = "auto") -> tuple[Network, Training, AnyPolicy, list[Any], tuple[int, ...]]:
    """(network with its best weights, training settings, policy, class names, shape of an item) of a finished run."""
    if not (folder / "result.json").exists():
        raise UserError(f"{folder}: no finished run here (no result.json)")
    saved = checkpoint.load(folder / checkpoint.MODEL)
    training = build(Training, json.loads((folder / "config.json").read_text())["training"])
    shape, classes = tuple(saved["shape"]), saved["classes"]
    net = build_network(training.net, shape, len(classes), training.width, training.embed_dim, training.head)
    net.load_state_dict(saved["weights"])
    return net.to(pick_device(device)), training, find_policy(saved["augment"]), classes, shape


def predict_file(folder: Path, path: Path, out: Path, device: str = "auto", skipped: list[str] | None = None,
                 quiet: bool = True) -> int:  # fmt: skip
    """Write item, label and confidence of everything in the file or folder, chunk by chunk; returns how many. What
    cannot be read is an error or, with a list to note it in, `skipped`."""
    from urrl.data.files import items_to_predict  # late: tables take a second to import
    from urrl.tables import protect

    net, training, policy, classes, shape = load_model(folder, device)
    source = json.loads((folder / "config.json").read_text()).get("source") or {}
    if out.exists():
        raise UserError(f"{out}: exists; nothing was changed")
    total, chunks = items_to_predict(path, shape, source.get("features"), skipped)
    names = [protect(str(name)) for name in classes]
    written = 0

    def write(file: Any) -> None:
        nonlocal written
        text = io.TextIOWrapper(file, "utf-8", newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["item", "label", "confidence"])
        with bar(path.name, total, quiet) as advance:
            for items, x in chunks:
                if len(x):
                    confidence, label = infer(net, x, policy, training.flip_test).logits.softmax(1).max(1)
                    for item, c, p in zip(items, label.tolist(), confidence.tolist()):
                        rows.writerow([protect(str(item)), names[c], f"{p:.4f}"])
                written += len(items)
                advance(len(items))
        text.detach()

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, write)
    return written
