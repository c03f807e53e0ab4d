"""Predictions of a finished run."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import torch

from urrl import checkpoint
from urrl.config import Training, build
from urrl.data.augment import AnyPolicy, find_policy
from urrl.errors import UserError, one_line
from urrl.evaluate import infer
from urrl.files import UNREADABLE, read_json, write_atomic
from urrl.nets import Network, build_network
from urrl.progress import bar
from urrl.run import pick_device


def load_model(folder: Path, device: str = "auto") -> tuple[Network, Training, AnyPolicy, list[Any], tuple[int, ...]]:
    """(network with its best weights, training settings, policy, class names, shape of an item) of a finished run."""
    if not (folder / "result.json").exists():
        raise UserError(f"{folder}: no finished run here (no result.json)")
    path = folder / checkpoint.MODEL
    saved, config = checkpoint.load(path), read_json(folder / "config.json")
    try:
        training = build(Training, config["training"])
        shape, classes, policy = tuple(saved["shape"]), list(saved["classes"]), find_policy(saved["augment"])
        with torch.device("meta"):  # takes no memory, whatever the config asks for, before the weights fit
            t = training
            net = build_network(t.net, shape, len(classes), t.width, t.embed_dim, t.head, t.members)
        net.load_state_dict(saved["weights"], assign=True)
    except UNREADABLE as error:
        raise UserError(f"{path}: not the model of this run ({one_line(error)})") from None
    return net.to(pick_device(device)), training, policy, classes, shape


def predict_file(folder: Path, path: Path, out: Path, device: str = "auto", skipped: list[str] | None = None,
                 quiet: bool = True) -> int:  # fmt: skip
    """Write item, label and confidence of everything in the file or folder, chunk by chunk; returns how many. What
    cannot be read is an error or, with a list to note it in, `skipped`."""
    from urrl.data.files import items_to_predict  # late: tables take a second to import
    from urrl.tables import protect

    net, training, policy, classes, shape = load_model(folder, device)
    source = read_json(folder / "config.json").get("source") or {}
    if out.exists():
        raise UserError(f"{out}: exists; nothing was changed")
    total, chunks = items_to_predict(path, shape, source.get("features"), skipped)
    names = [protect(str(name)) for name in classes]
    written = 0

    def write(file: Any) -> None:
        nonlocal written
        text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="")  # the name of a file may be no text
        rows, quoted = (csv.writer(text, lineterminator="\n", quoting=q) for q in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        rows.writerow(["item", "label", "confidence"])
        with bar(path.name, total, quiet) as advance:
            for items, x in chunks:
                if len(x):
                    seen = infer(net, x, policy, training.flip_test, training.move_test)
                    confidence, label = seen.logits.softmax(1).max(1)
                    for item, c, p in zip(items, label.tolist(), confidence.tolist()):
                        cells = [protect(str(item)), names[c], f"{p:.4f}"]
                        (quoted if "\r" in cells[0] + cells[1] else rows).writerow(cells)
                written += len(items)
                advance(len(items))
        text.detach()

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, write)
    return written
