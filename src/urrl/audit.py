"""What a run found out about its candidate sets: the suspects, worst first, which labels go missing where, and the
cleaned labels.

The evidence is the probability that the true label is outside the set as it was given, of p_y ~ f_y vote_y P(S | y):
the network's f, the vote of the K nearest neighbours' l and the likelihood of the item's own set, under the unreliable
rate that makes all sets likeliest.
"""

from __future__ import annotations

import base64
import glob
import io
import json
import os
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from urrl import checkpoint
from urrl.candidates import CandidateSets
from urrl.data import Splits, hold_out, load, part, split
from urrl.data.augment import normalise
from urrl.data.files import load_source
from urrl.data.own import data_sha256
from urrl.errors import UserError
from urrl.evaluate import infer
from urrl.files import alive, read_json, write_json, write_text
from urrl.functional import softmax_on
from urrl.knn import cosine_topk
from urrl.likelihood import estimate_mu, log_given
from urrl.nets import Out
from urrl.noise import Estimate, Noise, noise_by_vote
from urrl.predict import load_model
from urrl.tables import write_table
from urrl.warmstart import principal_components

NAMED = 5  # neighbours that are listed
SHOWN = 500  # suspects on the page
THUMBNAIL = 96  # longest side, in pixels


def label_issues(out: Out, l: Tensor, given: Tensor, classes: Sequence[Any], items: Sequence[Any] | None = None,
                 added: Tensor | None = None) -> pd.DataFrame:  # fmt: skip
    """A row for each item, worst first. out: the network's for all items; l (n, C) their label distributions; given
    (n, C) their sets as they came; added (n, C) the epoch in which a label entered the set, negative where none did.

    evidence    that the true label is missing in the given set; above 0.5 the item is a suspect
    suggested   the likeliest label, of a suspect outside the given set, and its probability `confidence`
    epoch       in which the run itself added that label to the set, from 1
    votes       how many of the `of` nearest neighbours have that label as their best; `neighbours` names the nearest
    """
    f, l, given = out.logits.softmax(1).cpu(), l.cpu(), given.cpu()
    n, C = given.shape
    near = _neighbours(out.feature.cpu(), min(200, max(10, n // (4 * C))))  # a quarter of a class
    vote = torch.cat([F.embedding_bag(part, l, mode="mean") for part in near.split(4096)])
    p = (f * vote).clamp_min(1e-12)
    p = p / p.sum(1, keepdim=True)
    p = (p.log() + log_given(given, estimate_mu(p, given))).softmax(1)
    evidence = (p * ~given).sum(1)
    confidence, label = p.masked_fill(given == (evidence > 0.5)[:, None], -1).max(1)
    agrees = l.argmax(1)[near] == label[:, None]  # (n, K)
    entered = torch.full((n,), -1) if added is None else added.cpu().long().gather(1, label[:, None]).squeeze(1)
    name = np.asarray(range(n) if items is None else items, dtype=object)
    frame = pd.DataFrame(
        {
            "item": name,
            "given": [[classes[c] for c in row.nonzero()[0]] for row in given.numpy()],
            "suggested": [classes[c] for c in label.tolist()],
            "evidence": evidence.double().numpy().round(6),
            "confidence": confidence.double().numpy().round(6),
            "epoch": pd.array((entered + 1).numpy(), dtype="Int64"),
            "votes": agrees.sum(1).numpy(),
            "of": near.shape[1],
            "neighbours": [name[row[yes][:NAMED]].tolist() for row, yes in zip(near.numpy(), agrees.numpy())],
        }
    )
    frame["epoch"] = frame["epoch"].where(frame["epoch"] > 0)
    return frame.sort_values(["evidence", "confidence"], ascending=False, kind="stable")  # the index is the item's row


def _neighbours(feature: Tensor, k: int) -> Tensor:
    """(n, k), nearest first. Whitened: the directions that do not tell the classes apart find neighbours that the
    network did not put there by the item's own set."""
    z = F.normalize(principal_components(feature, 128, whiten=True), dim=1)
    return torch.cat([i.gather(1, s.argsort(1, descending=True)) for _, s, i in cosine_topk(z, k)])


def suspects(issues: pd.DataFrame) -> pd.DataFrame:
    return issues[issues["evidence"] > 0.5]


def confusions(issues: pd.DataFrame) -> pd.DataFrame:
    """Which label is missing when which are given: missing, given, items, over the suspects, most frequent first."""
    pairs = suspects(issues)[["suggested", "given"]].explode("given")
    pairs = pairs[pairs["suggested"] != pairs["given"]].rename(columns={"suggested": "missing"})
    return pairs.value_counts().reset_index(name="items")


def cleaned(issues: pd.DataFrame) -> pd.DataFrame:
    """The labels as they should be, in the order of the items: the suggested one where its confidence is above 0.5,
    else the given set and it. Training takes this table as it is."""
    frame = issues.sort_index()
    columns = (frame[name] for name in ("suggested", "confidence", "given"))
    sets = [[best] if p > 0.5 else [*given, *({best} - {*given})] for best, p, given in zip(*columns)]
    return pd.DataFrame(
        {"item": frame["item"], "candidates": sets, "confidence": frame["confidence"], "given": frame["given"]}
    )


class Audit(NamedTuple):
    x: Tensor  # the items
    classes: list[Any]
    issues: pd.DataFrame  # its index is the row in x
    config: dict[str, Any]  # the run's
    noise: Noise | None = None  # of the given sets, by the vote of neighbours, whatever the run learned


def audit_run(folder: Path, data_dir: Path | None = None, device: str = "auto") -> Audit:
    """Of a finished run: its training items and, of a user's own data, the held-out ones too."""
    net, training, policy, classes, _ = load_model(folder, device)
    config = read_json(folder / "config.json")
    given = CandidateSets.load(folder / "candidates.npz").mask
    state = checkpoint.load(folder / checkpoint.LAST)["method"]
    if "l" not in state:
        raise UserError(f"{folder}: a run on so many items and classes is not audited: its labels are kept sparse")
    if config.get("source"):
        loaded = load_source(config["source"])
        dataset, names = loaded.dataset, loaded.items
        if data_sha256(dataset) != config["data_sha256"]:
            raise UserError(f"{folder}: the data is not what the run was trained on any more")
        splits = hold_out(dataset, float(config["split"].removeprefix("holdout ")), config["seed"])
    else:
        dataset, names = load(config["dataset"], data_dir), None
        splits = split(dataset, config["split"], config["seed"], config["subset"])
        splits = Splits(splits.train, part(dataset, splits.val.index[:0]), splits.test)
    rows = torch.cat([splits.train.index, splits.val.index])
    x = dataset.x[rows]
    out = Out(*(t.cpu() for t in infer(net, x, policy, training.flip_test, training.move_test)))
    held = out.logits[len(given) :]
    if len(held):
        assert splits.val.S is not None
        given = torch.cat([given, splits.val.S])
    l = torch.cat([state["l"], softmax_on(given[len(rows) - len(held) :], held)])
    added = F.pad(state["added"].long(), (0, 0, 0, len(held)), value=-1) if "added" in state else None
    items = rows.tolist() if names is None else [names[row] for row in rows.tolist()]
    noise = noise_by_vote(x if x.dim() == 4 else normalise(x, policy), given)
    return Audit(x, classes, label_issues(out, l, given, classes, items, added), config, noise)


def audit(folder: Path, out: Path, form: str = "csv", data_dir: Path | None = None, device: str = "auto"
          ) -> dict[str, Any]:  # fmt: skip
    """Write what a finished run found out about its labels into a new folder: the tables issues, confusions and
    cleaned, summary.json and index.html. Returns the summary."""
    if out.exists():
        raise UserError(f"{out}: exists; nothing was changed")
    found = audit_run(folder, data_dir, device)
    summary = {
        "dataset": found.config["dataset"],
        "method": found.config["method"],
        "items": len(found.issues),
        "suspects": len(suspects(found.issues)),
        "own": found.config.get("source") is not None,  # a user's own files
        "noise": found.noise
        and {
            name: dict(zip(Estimate._fields, (round(v, 4) for v in rate)))
            for name, rate in found.noise._asdict().items()
            if name != "rows"
        },
        "missing": round(float(found.issues["evidence"].mean()), 4),  # expected share of sets without the true label
    }
    for left in out.parent.glob(f"{glob.escape(out.name)}.*.part"):
        if not alive(left.name.split(".")[-2]):  # killed in the middle
            shutil.rmtree(left)
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")
    unfinished.mkdir(parents=True)
    try:
        write_table(found.issues, unfinished / f"issues.{form}")
        write_table(confusions(found.issues), unfinished / f"confusions.{form}")
        write_table(cleaned(found.issues), unfinished / f"cleaned.{form}")
        write_json(unfinished / "summary.json", summary)
        write_text(unfinished / "index.html", page(found, summary))
        os.replace(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return summary


def page(found: Audit, summary: dict[str, Any]) -> str:
    """One self-contained page with the worst suspects. The data is JSON in it, and its script makes every text a text
    node: no name of an item or a class can become markup."""
    worst = suspects(found.issues)[:SHOWN]
    row_of = dict(zip(found.issues["item"], found.issues.index))
    rows = [
        {**record, "epoch": None if pd.isna(record["epoch"]) else int(record["epoch"]), "row": int(row)}
        for row, record in zip(worst.index, worst.to_dict("records"))
    ]
    pictures: dict[str, str] = {}
    if found.x.dim() == 4:
        seen = [item for record in rows for item in (record["item"], *record["neighbours"])]
        pictures = {str(item): thumbnail(found.x[row_of[item]]) for item in dict.fromkeys(seen)}
    data = {"summary": summary, "classes": found.classes, "rows": rows, "pictures": pictures,
            "confusions": confusions(found.issues).to_dict("records")}  # fmt: skip
    text = json.dumps(data, ensure_ascii=False, default=str).replace(
        "<", "\\u003c"
    )  # nothing can end the script element
    return files("urrl").joinpath("audit.html").read_text("utf-8").replace("{{DATA}}", text)


def thumbnail(x: Tensor) -> str:
    """An image (ch, H, W) uint8 as a data: URL."""
    from PIL import Image

    array = x.permute(1, 2, 0).numpy()
    image = Image.fromarray(array if array.shape[2] in (3, 4) else array[..., 0])
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
