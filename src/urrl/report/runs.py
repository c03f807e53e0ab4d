"""The runs below a folder, whatever made them: finished, failed, begun or only planned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from urrl import paper
from urrl.errors import UserError
from urrl.files import read_json
from urrl.train import read_history

T = TypeVar("T")

NAMES = {
    "urrl": "URRL", "proden": "PRODEN", "rc": "RC", "cc": "CC", "rabs": "RABS", "pico": "PiCO", "pico_plus": "PiCO+",
    "cr_dpll": "CR-DPLL", "alim": "ALIM", "irnet": "IRNet", "average": "average (lower bound)",
    "supervised": "supervised (upper bound)",
}  # fmt: skip
ORDER = [*paper.METHODS, *(name for name in NAMES if name not in paper.METHODS)]
SIZED = ("ema", "lr", "pad", "flip_test", "move_test")  # which the size of the data decides, too
PARTS = ("use_m", "use_cr", "use_correction")  # what the ablation takes away


@dataclass(frozen=True)
class Entry:
    """A run: finished, failed, begun or only planned."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None = None
    error: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    study: bool = False  # there for the ablation or for phi only
    pictured: bool = False  # there for the t-SNE figure

    @property
    def setting(self) -> tuple[Any, ...]:
        """What the runs of one table have in common."""
        c, t = self.config, self.config["training"]
        split = c["split"].partition(":")[0]  # the folds are repetitions
        data = (c.get("data_sha256") or "")[:6]  # a user's own
        lr = t["lr"] if t["net"] == "mlp" and t["lr"] != usual(c).get("lr", t["lr"]) else None  # else in `variant`
        return (c["dataset"], c["recipe"], t["net"], t["width"], t["epochs"], t["batch_size"], lr, c["subset"],
                c["convention"], split, data)  # fmt: skip

    @property
    def rates(self) -> tuple[float, float]:
        """(eta, mu), -1 where nobody knows: of sets that came with the data."""
        eta, mu = (-1.0 if self.config[rate] is None else self.config[rate] for rate in ("eta", "mu"))
        return eta, mu

    @property
    def repetition(self) -> tuple[int, str]:
        return (self.config["seed"], self.config["split"])

    @property
    def accuracy(self) -> float | None:
        known = None if self.result is None else self.result.get("test_accuracy")
        return None if known is None else 100 * known


def find_runs(root: Path) -> list[Entry]:
    """Every run below the folder, and every cell that a grid there has planned."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    found: dict[Path, Entry] = {}
    problems: list[str] = []
    for path in sorted(root.rglob("config.json")):
        try:
            config = read_json(path)
        except UserError as error:
            problems.append(f"{error}; the run is left out")
            continue
        if {"dataset", "method", "training", "options"} <= config.keys():
            found[path.parent] = _entry(path.parent, config)
    for path in sorted(root.rglob("grids/*.json")):
        plan = _whole(partial(read_json, path), "what was planned is left out") or {}
        for cell in plan.get("cells", []) if "grid" in plan else []:  # else another program's
            folder = path.parents[1] / cell.pop("folder")
            if folder not in found:
                found[folder] = _entry(folder, cell)
            if plan["grid"] == "paper:tsne":
                found[folder] = replace(found[folder], pictured=True)
    if not found:
        raise UserError(problems[0] if problems else f"{root}: no run below this folder (no config.json)")
    for problem in problems:
        _say(problem)
    entries = []
    for same in groups(found.values(), lambda e: (e.setting, e.rates)).values():
        several = len({label(e.config) for e in same if is_study(e.config)}) > 1  # one alone is compared with nothing
        entries += [replace(e, study=several and is_study(e.config)) for e in same]
    return sorted(entries, key=lambda e: e.folder)


def _entry(folder: Path, config: dict[str, Any]) -> Entry:
    result = error = None
    if (folder / "result.json").exists():
        result = _whole(partial(read_json, folder / "result.json"), "the run counts as not done")
    if (folder / "error.json").exists():
        told = _whole(partial(read_json, folder / "error.json"), "why the run failed is not known")
        error = told["error"] if told else "not known: error.json is damaged"
    history = _whole(partial(read_history, folder, _say), "its epochs are left out")
    return Entry(folder, config, result, error, history or [])


def _whole(read: Callable[[], T], otherwise: str) -> T | None:
    """What is read, or None and a word about it where the file is damaged."""
    try:
        return read()
    except UserError as problem:
        _say(f"{problem}; {otherwise}")
        return None


def _say(line: str) -> None:
    print(f"urrl: {line}", file=sys.stderr)


def by_its_size(config: dict[str, Any]) -> bool:
    """Whether the number and the shape of the items decided over settings."""
    return config.get("data_sha256") is not None or config["training"]["net"] == "mlp"


def usual(config: dict[str, Any]) -> dict[str, Any]:
    """What the recipe sets for the method; of few feature vectors, where sizes decide."""
    from urrl.config import RECIPES, by_size

    which = config["dataset"], config["method"], config["training"]["epochs"]
    values = RECIPES[config["recipe"]](*which) if config["recipe"] in RECIPES else {}
    return values | (by_size(2, (1,), config["method"]) if by_its_size(config) and config["recipe"] == "fast" else {})


def variant(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name of the method, what is set otherwise than in its recipe); for URRL, than in the paper's form where that is
    shorter to say."""
    from urrl.bench import paper_form
    from urrl.config import RECIPES, Training, build
    from urrl.methods import METHODS

    method, recipe = config["method"], RECIPES.get(config["recipe"])
    name = NAMES.get(method, method)
    if method not in METHODS or recipe is None:
        return name, {}
    values = recipe(config["dataset"], method, config["training"]["epochs"])
    own = dict(vars(build(METHODS[method].Config, {k: v for k, v in values.items() if k in config["options"]})))
    if config["training"]["net"] == "mlp":
        values = usual(config)
    training = vars(build(Training, {k: v for k, v in values.items() if k not in config["options"]}))
    told: tuple[str, ...] = ("net", "width", "epochs", "batch_size")  # in the title
    if by_its_size(config):
        told += SIZED
        own |= {k: v for k, v in config["options"].items() if usual(config).get(k) == v}
    also = {k: v for k, v in config["training"].items() if k not in told and training.get(k, v) != v}
    differs = {k: v for k, v in config["options"].items() if own.get(k, v) != v}
    if method == "urrl":
        printed = paper_form(config["dataset"])
        from_printed = {k: v for k, v in config["options"].items() if printed.get(k, v) != v}
        if len(from_printed) < len(differs):
            return f"{name}, paper's form", from_printed | also
    return name, differs | also


def label(config: dict[str, Any]) -> str:
    name, differs = variant(config)
    return " ".join([name, *(f"{k}={json.dumps(v)}" for k, v in differs.items())])


def is_study(config: dict[str, Any]) -> bool:
    """Whether the run differs from others in a part of URRL or in phi alone."""
    own = variant(config)[1].keys() & config["options"].keys()
    return config["method"] == "urrl" and bool(own) and own <= {*PARTS, "phi"}


def rank(entry: Entry) -> tuple[int, str]:
    method = entry.config["method"]
    return (ORDER.index(method) if method in ORDER else len(ORDER), label(entry.config))


def groups(entries: Iterable[Entry], key: Any) -> dict[Any, list[Entry]]:
    made: dict[Any, list[Entry]] = {}
    for entry in entries:
        made.setdefault(key(entry), []).append(entry)
    return made
