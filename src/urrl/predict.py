"""Predictions of a finished run."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from urrl import checkpoint
from urrl.config import Training, build
from urrl.data.augment import AnyPolicy, find_policy
from urrl.errors import UserError
from urrl.evaluate import infer
from urrl.files import write_text
from urrl.nets import Network, build_network
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


def read_images(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """(n, H, W) or (n, H, W, channels) uint8 -> (n, channels, H, W)."""
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an array file ({error})") from None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        raise UserError(f"{path}: images are one uint8 array, not {getattr(array, 'dtype', 'an archive')}")
    images = array[..., None] if array.ndim == 3 else array
    wanted = (shape[1], shape[2], shape[0])
    if images.shape[1:] != wanted:
        raise UserError(f"{path}: the run takes images of {wanted}, these are {images.shape[1:]}")
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def predict_file(folder: Path, path: Path, out: Path, device: str = "auto") -> int:
    """Write item, label and confidence of every image in the file; returns how many."""
    net, training, policy, classes, shape = load_model(folder, device)
    x = read_images(path, shape)
    if out.exists():
        raise UserError(f"{out}: exists; nothing was changed")
    confidence, label = infer(net, x, policy, training.flip_test).logits.softmax(1).max(1)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["item", "label", "confidence"])
    for item, (c, p) in enumerate(zip(label.tolist(), confidence.tolist())):
        rows.writerow([item, classes[c], f"{p:.4f}"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text.getvalue())
    return len(x)
