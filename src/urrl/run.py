"""The life of a run's folder: config.json, candidates.npz, metrics.jsonl (a line an epoch), last.ckpt and
previous.ckpt, then model.ckpt, curves.png and, last of all, result.json: a folder with a result is done."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import urrl
from urrl import checkpoint, distributed
from urrl.candidates import CandidateSets, generate, make_unreliable
from urrl.config import Run, Training, by_size, resolve
from urrl.data import Dataset, Splits, default_split, hold_out, load, split
from urrl.data.augment import AnyPolicy, Policy, find_policy
from urrl.data.own import data_sha256
from urrl.data.stream import Items
from urrl.errors import UserError
from urrl.evaluate import label_report, part_accuracy, validation
from urrl.files import locked, read_json, sealed, write_json
from urrl.methods import METHODS, Method, method_name
from urrl.nets import Network
from urrl.plots import draw_curves
from urrl.progress import Progress
from urrl.seeding import derive_seed
from urrl.train import State, count_batches, fit, new_network, scouted


def make_run(
    dataset_name: str, method: str, recipe: str, settings: dict[str, Any], *, eta: float | None = None,
    mu: float | None = None, seed: int = 0, convention: str | None = None, split_kind: str | None = None,
    subset: int | None = None, data_dir: Path | None = None, candidates: Path | None = None,
) -> tuple[Run, Dataset, Splits, CandidateSets]:  # fmt: skip
    """A run, checked, with its data and candidate sets. The sets depend on the cell alone, not on the method; those of
    data that brings its own are not drawn: eta, mu and convention are then None."""
    method = method_name(method)
    if candidates is not None and (eta, mu, convention) != (None, None, None):
        raise UserError(f"{candidates}: saved sets have their rates: --eta, --mu and --convention do not go with them")

    def resolved(base: dict[str, Any] | None = None) -> Run:
        return resolve(
            dataset_name, method, recipe, METHODS[method].Config, settings, base, eta=None, mu=None, convention=None,
            seed=seed, split=split_kind or "", subset=subset,
        )  # fmt: skip

    resolved()  # settings that cannot be are refused before the data is read
    dataset = load(dataset_name, data_dir)
    split_kind = split_kind or default_split(dataset)
    if candidates is None:
        splits, sets = make_sets(dataset, split_kind, subset, eta, mu, convention, seed)
    else:
        splits, sets = split(dataset, split_kind, seed, subset), CandidateSets.load(candidates)
    if len(splits.train) < 2:
        raise UserError("training takes at least 2 items")
    base = None
    if splits.train.x.dim() == 2:  # features
        base = (
            by_size(len(splits.train), tuple(splits.train.x.shape[1:]), method) if recipe == "fast" else {"net": "mlp"}
        )
    run = resolved(base)
    origin: dict[str, Any] = {key: sets.about.get(key) for key in ("eta", "mu", "convention")}
    run = dataclasses.replace(run, **origin)
    if candidates is None:
        return run, dataset, splits, sets
    if sets.mask.shape != (len(splits.train), len(dataset.classes)):
        n, c = sets.mask.shape
        raise UserError(f"{candidates}: {n} sets of {c} classes, but the training part has {len(splits.train)} items "
                        f"of {len(dataset.classes)} classes (were --split, --seed or --subset others?)")  # fmt: skip
    here = {"dataset": dataset_name, "split": split_kind, "subset": subset, "seed": seed}  # the seed is the split's too
    for key, value in here.items():
        if (drawn_for := sets.about.get(key, value)) != value:
            raise UserError(f"{candidates}: drawn for the items of {key} {drawn_for}, not for those of {key} {value}")
    return dataclasses.replace(run, sets_sha256=sets.sha256), dataset, splits, sets


def make_sets(
    dataset: Dataset, split_kind: str, subset: int | None, eta: float | None, mu: float | None, convention: str | None,
    seed: int,
) -> tuple[Splits, CandidateSets]:  # fmt: skip
    """(splits, candidate sets of the training part): drawn for the true labels, or those that came with the data; of
    these a share mu loses the true label, in the validation part too."""
    which = {"dataset": dataset.name, "split": split_kind, "subset": subset}  # the items that they are for
    if dataset.S is None:
        splits = split(dataset, split_kind, seed, subset)
        eta, mu = (0.3 if rate is None else rate for rate in (eta, mu))
        drawn = generate(splits.train.truth, len(dataset.classes), eta, mu, convention or "paper", seed)
        return splits, CandidateSets(drawn.mask, {**drawn.about, **which})
    if eta is not None or convention is not None:
        raise UserError(f"{dataset.name} brings its own candidate sets: --eta and --convention do not apply "
                        "(--mu M swaps true labels out of them)")  # fmt: skip
    own = CandidateSets(dataset.S)
    if mu is not None:
        own = make_unreliable(own, dataset.truth, mu, seed)
    splits = split(dataclasses.replace(dataset, S=own.mask), split_kind, seed, subset)
    assert splits.train.S is not None
    return splits, CandidateSets(splits.train.S, {**own.about, "seed": seed, **which})


def make_own_run(
    dataset: Dataset, method: str, settings: dict[str, Any], seed: int, validation: float = 0.1
) -> tuple[Run, Splits, CandidateSets]:
    """A run on a user's own data with the candidate sets that came with it, `fast` with settings after its size;
    `validation`: the share of the rows on whose sets the best epoch is chosen."""
    method = method_name(method)
    if METHODS[method].bound == "upper" and dataset.y is None:
        raise UserError(f"method {method!r} learns from the true labels, which are not known")
    splits = hold_out(dataset, validation, seed)
    n, shape = len(splits.train), tuple(dataset.x.shape[1:])
    if n < 2 or splits.train.S is None:
        raise UserError("training takes at least 2 items with candidate sets")
    sets = CandidateSets(splits.train.S)
    run = resolve(
        dataset.name, method, "fast", METHODS[method].Config, settings, by_size(n, shape, method), eta=None, mu=None,
        convention=None, seed=seed, split=f"holdout {validation:g}", subset=None, sets_sha256=sets.sha256,
        data_sha256=data_sha256(dataset),
    )  # fmt: skip
    return run, splits, sets


def make_file_run(
    source: dict[str, Any], method: str, settings: dict[str, Any], seed: int
) -> tuple[Run, Dataset, Splits, CandidateSets, list[str]]:
    """A run on a user's own files, as `load_source` takes them, and a line for each bad row that was left out."""
    from urrl.data.files import load_source  # late: tables take a second to import

    loaded = load_source(source)
    run, splits, sets = make_own_run(loaded.dataset, method, settings, seed)
    if loaded.features is not None:
        source = {**source, "features": loaded.features}
    return dataclasses.replace(run, source=source), loaded.dataset, splits, sets, loaded.skipped


def open_folder(folder: Path, run: Run, resume: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Make the folder or check that it holds this very run. Returns its result where it is done already."""
    config = folder / "config.json"
    if config.exists():
        held = read_json(config)
        held.pop("version", None)
        wanted = json.loads(json.dumps(run.to_dict()))
        differing = sorted(k for k in held.keys() | wanted.keys() if held.get(k) != wanted.get(k))
        if differing:
            raise UserError(f"{folder}: holds another run (it differs in {', '.join(differing)}); nothing was changed")
        if not resume:
            raise UserError(f"{folder}: holds this run already; add --resume to go on, or choose another --out")
        try:
            return read_json(result) if (result := folder / "result.json").exists() else None
        except UserError as error:
            say(f"{error}; made again from the last epoch")
            return None
    # A run killed while it wrote its first file has left a part of it, and may start again.
    if folder.exists() and not (folder.is_dir() and all(p.match("config.json.*.part") for p in folder.iterdir())):
        raise UserError(f"{folder}: exists and is not a run's folder; nothing was changed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(config, sealed({**run.to_dict(), "version": urrl.__version__}))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    return None


def pick_device(name: str) -> torch.device:
    gpus = torch.cuda.device_count()
    if name in ("auto", "cuda") and 0 < gpus <= distributed.local_rank():
        raise UserError(f"more processes than the {gpus} GPUs of this machine; start {gpus}, or add --device cpu")
    if name != "auto":
        try:
            torch.zeros(1, device=name).item()
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]})") from None
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def build_method(run: Run, x: Items, policy: AnyPolicy, given: CandidateSets, device: str) -> Method:
    """The method with its network, freshly initialised by the run's seed and by some of the items x, on its device."""
    t, shape = run.training, tuple(x.shape[1:])
    side = min(shape[1:], default=0)  # 0: of features
    if t.flip_test and not side:
        raise UserError("option flip_test=true takes images")
    for name, pixels in (("pad", t.pad), ("move_test", t.move_test or -1)):
        if pixels >= 0 and pixels >= side:
            raise UserError(f"option {name}={pixels} takes images of more than {pixels} pixels a side")
    first = t.scout if scouted(t) else t.width
    net = new_network(t, first, x, policy, given.n_classes, derive_seed(run.seed, "weights"))
    return METHODS[run.method](net, given, run.options).to(pick_device(device))


def learn(method: Method, splits: Splits, given: CandidateSets, policy: AnyPolicy, training: Training, seed: int,
          folder: Path | None, resume: bool, show: Progress) -> State:  # fmt: skip
    """Train the method and leave its network with the best epoch's weights."""

    def examine(judged: Network) -> dict[str, Any]:
        return {**validation(judged, splits.val, policy), **label_report(method, given.mask, splits.train.y)}

    moving = policy
    if isinstance(policy, Policy):
        own = {name: value for name in ("pad", "cutout") if (value := getattr(training, name)) >= 0}
        moving = dataclasses.replace(policy, **own, autoaugment=policy.autoaugment or training.autoaugment)
    with show:
        state = fit(method, splits.train.x, moving, training, seed, examine, folder, resume, show)
    method.net.load_state_dict(state.best_weights)
    return state


def train(run: Run, dataset: Dataset, splits: Splits, sets: CandidateSets, folder: Path, resume: bool = False,
          device: str = "auto", show: Progress | None = None) -> dict[str, Any]:  # fmt: skip
    """Train one run into its folder and return its result. Busy: another process does so already."""
    show = show or Progress(quiet=True)
    kind = METHODS[run.method]
    policy = find_policy(dataset.augment)
    given = CandidateSets.of_labels(splits.train.truth, sets.n_classes) if kind.bound == "upper" else sets
    t = run.training
    shape = tuple(splits.train.x.shape[1:])
    method = build_method(run, splits.train.x, policy, given, device)
    n = len(splits.train.x)
    smallest = n // count_batches(n, t.batch_size)
    if (world := distributed.world()) > 1 and smallest < 2 * world and not t.sync_bn:
        raise UserError(f"{smallest} items a batch leave some of {world} processes fewer than 2, too few for batch "
                        f"normalisation: --set sync_bn=true normalises over all processes")  # fmt: skip

    def take_folder(held: contextlib.ExitStack) -> dict[str, Any] | None:
        if done := open_folder(folder, run, resume, show.say):
            return done
        held.enter_context(locked(folder / "config.json"))
        for left in folder.glob("*.part"):  # by a process that was killed
            left.unlink()
        saved_sets = folder / "candidates.npz"
        if not saved_sets.exists():
            sets.save(saved_sets)
        elif CandidateSets.load(saved_sets).sha256 != sets.sha256:
            raise UserError(f"{saved_sets}: are not the candidate sets of this run")
        return None

    if t.compile and not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")):
        raise UserError("option compile takes a C++ compiler, and there is none on the PATH")

    # All that can be refused has been: only now is the folder touched.
    with contextlib.ExitStack() as held:  # the lock of the folder
        if done := distributed.on_first(lambda: take_folder(held)):
            return done

        state = learn(method, splits, given, policy, t, run.seed, folder, resume, show)
        net = method.net  # after a scout another one than before
        # the test part is touched here, once
        test_accuracy = part_accuracy(net, splits.test, policy, t.flip_test, t.move_test)
        result = {
            "method": run.method,
            "dataset": run.dataset,
            "eta": run.eta,
            "mu": run.mu,
            "convention": run.convention,
            "seed": run.seed,
            "recipe": run.recipe,
            "bound": kind.bound,
            "test_accuracy": test_accuracy,
            **{key: value for key, value in state.history[state.best_epoch].items() if key.startswith("val_")},
            "best_epoch": state.best_epoch,
            "epochs": state.epoch,
            "processes": distributed.world(),
            "seconds": round(state.seconds, 3),
            "train_flops": state.flops,
            "samples_per_second": round(n * t.members * state.epoch / state.seconds, 1),
            **label_report(method, given.mask, splits.train.y),
            "mean_set_size": sets.mean_size,
            "n_train": n,
            "n_test": len(splits.test.x),
            "parameters": sum(p.numel() for p in net.parameters()),
            "sets_sha256": sets.sha256,
            "version": urrl.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        if distributed.rank() == 0:
            augment = dataset.augment if isinstance(dataset.augment, str) else dataclasses.asdict(policy)
            checkpoint.save(folder / checkpoint.MODEL, {"weights": state.best_weights, "classes": list(dataset.classes),
                                                        "shape": list(shape), "augment": augment})  # fmt: skip
            noise = "" if run.eta is None else f", η={run.eta}, μ={run.mu}"
            draw_curves(state.history, folder / "curves.png", f"{run.method} on {run.dataset}{noise}")
            write_json(folder / "result.json", sealed(result))
        return result
