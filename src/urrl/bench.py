"""A grid of runs: what it holds, what is left to do, and doing it. The folders are the memory: each run has its own,
named by a hash of its complete config; with a result.json it is done, with an error.json it failed, else it goes on
from its last epoch. So a grid may be killed, extended or started twice at any time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
import tomllib
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urrl import paper
from urrl.config import RECIPES, Run, Training, parse_settings, resolve
from urrl.data import default_split, load
from urrl.engines import ENGINES, Engine
from urrl.errors import Busy, UserError
from urrl.files import locked, read_json, write_json
from urrl.methods import METHODS, method_name
from urrl.progress import clock
from urrl.run import make_run, make_sets

GRIDS = ("paper:fmnist", "paper:cifar10", "paper:cifar100", "paper:ablation", "paper:phi", "paper:tsne")
MOST = 100_000  # cells of a grid
DEATHS = 2  # how often a run whose worker died is begun again

# The keys of a grid file, with their types and the defaults of `train` (None: it depends on the data). Seeds come first
# in the product: a grid that is stopped early has one seed of everything rather than all seeds of something.
KEYS: dict[str, tuple[type, Any]] = {
    "seed": (int, 0), "dataset": (str, None), "eta": (float, None), "mu": (float, None), "convention": (str, None),
    "split": (str, None), "subset": (int, None), "candidates": (str, None), "recipe": (str, "fast"),
    "epochs": (int, None), "method": (str, "urrl"),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    run: Run
    arguments: dict[str, Any]  # of make_run, as plain values

    @property
    def name(self) -> str:
        """Of the run's folder."""
        r = self.run
        digest = hashlib.sha256(json.dumps(r.to_dict(), sort_keys=True).encode()).hexdigest()[:10]
        rates = "".join(f"-{rate}{value}" for rate, value in (("eta", r.eta), ("mu", r.mu)) if value is not None)
        return f"{r.dataset}-{r.method}{rates}-seed{r.seed}-{digest}"


def make_cell(values: dict[str, Any], settings: dict[str, Any], data_dir: Path | None) -> Cell:
    """A cell from one value for each of KEYS and the settings that `--set` would take."""
    v = {key: default for key, (_, default) in KEYS.items()} | values
    if v["epochs"] is not None:
        if "epochs" in settings:
            raise UserError("epochs is given twice")
        settings = settings | {"epochs": v["epochs"]}
    method = method_name(v["method"])
    cell = {key: v[key] for key in ("eta", "mu", "convention", "seed", "subset")}
    arguments = {
        "dataset_name": v["dataset"], "method": method, "recipe": v["recipe"], "settings": settings, **cell,
        "split_kind": v["split"], "candidates": _absolute(v["candidates"]), "data_dir": _absolute(data_dir),
    }  # fmt: skip
    if v["candidates"] is not None or v["dataset"] not in paper.ACCURACY:  # what they are is a part of the config
        return Cell(make_run(**arguments)[0], arguments)
    config = METHODS[method].Config
    cell |= {key: default for key, default in (("eta", 0.3), ("mu", 0.3), ("convention", "paper")) if cell[key] is None}
    return Cell(
        resolve(v["dataset"], method, v["recipe"], config, settings, split=v["split"] or "paper", **cell), arguments
    )


def _absolute(path: str | Path | None) -> str | None:
    """A worker may be in another folder."""
    return None if path is None else str(Path(path).absolute())


def read_grid(grid: str, given: dict[str, list[Any]], data_dir: Path | None = None,
              settings: dict[str, Any] | None = None) -> list[Cell]:  # fmt: skip
    """The cells of a named grid or of a file, each once. `given` and `settings` (of the command line) go over what the
    grid says."""
    settings = settings or {}
    if grid in GRIDS:
        cells = [make_cell(values, own | settings, data_dir) for values, own in paper_grid(grid, given)]
    elif (path := Path(grid)).is_file():
        cells = file_grid(path, given, data_dir, settings)
    else:
        raise UserError(f"{grid}: neither a file nor one of the grids {', '.join(GRIDS)}")
    return list({cell.name: cell for cell in cells}.values())


def paper_grid(grid: str, given: dict[str, list[Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(values, settings) of each cell of a table or figure of the paper."""
    name = grid.partition(":")[2]
    studied: dict[str, tuple[float, float]] = {**paper.STUDIED, "fmnist": (0.3, 0.3)}  # F-MNIST is ours: it is small
    if name in paper.ACCURACY:
        datasets, methods = [name], list(paper.METHODS)
        places = {name: list(paper.ACCURACY[name])}
        variants: dict[str, list[dict[str, Any]]] = {name: [{}]}
    else:
        datasets, methods = (["cifar10"], list(paper.METHODS)) if name == "tsne" else (list(paper.STUDIED), ["urrl"])
        places = {dataset: [cell] for dataset, cell in studied.items()}
        variants = {dataset: _variants(name, dataset) for dataset in studied}
        if name != "tsne" and given.get("method", methods) != methods:
            raise UserError(f"{grid} is about the parts of urrl: there is no other method in it")
    for dataset in given.get("dataset", []):
        if dataset not in places:
            raise UserError(f"{grid} has no data set {dataset!r}; it can be run on {', '.join(places)}")
    axes: dict[str, list[Any]] = {"seed": [0] if name == "tsne" else [0, 1, 2], "dataset": datasets, "method": methods}
    axes |= given
    methods = axes.pop("method")
    return [
        ({**chosen, "eta": eta, "mu": mu, "method": method}, settings)
        for chosen in (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
        for eta, mu in places[chosen["dataset"]]
        for method in methods
        for settings in variants[chosen["dataset"]]
    ]


def _variants(study: str, dataset: str) -> list[dict[str, Any]]:
    """Settings of URRL in a study: its own options and its views as the paper has them, whatever the recipe says of
    them (of the fast switches, one stands in for a part that the ablation takes away)."""
    if study == "tsne":
        return [{}]
    printed = paper_form(dataset)
    printed |= {name: getattr(Training, name) for name in ("again", "scout", "cutout", "autoaugment")}
    if study == "phi":
        return [{**printed, "phi": phi} for phi in paper.PHI]
    return [{**printed, "use_m": row.use_m, "use_cr": row.use_cr, "use_correction": row.use_correction}
            for row in paper.ABLATION]  # fmt: skip


def paper_form(dataset: str) -> dict[str, Any]:
    """URRL's own options as in the recipe `paper`."""
    values = RECIPES["paper"](dataset, "urrl")
    return {f.name: values.get(f.name, f.default) for f in dataclasses.fields(METHODS["urrl"].Config)}


def file_grid(path: Path, given: dict[str, list[Any]], data_dir: Path | None, over: dict[str, Any]) -> list[Cell]:
    """The product of the lists in a TOML file: KEYS, and a table `set` with options of the method or the training."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # tomllib names the line
        raise UserError(f"{path}: {error}") from None

    def refuse(key: str, problem: str) -> UserError:
        pattern = rf"\s*(set\.)?[\"']?{re.escape(key)}[\"']?\s*[=.]|\s*\[\s*{re.escape(key)}\s*\]"
        lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(pattern, line)]
        return UserError(f"{path}{f', line {lines[0]}' if lines else ''}: {problem}")

    settings = content.pop("set", {})
    if not isinstance(settings, dict):
        raise refuse("set", "set is a table of options, as in set.phi = [0.6, 0.7]")
    axes: dict[str, list[Any]] = {}
    for key, value in content.items():
        if key not in KEYS:
            raise refuse(key, f"{key!r} is unknown; there are: {', '.join(KEYS)} and the table set")
        kind = KEYS[key][0]
        axes[key] = [float(v) if kind is float and type(v) is int else v for v in _as_list(value)]
        for v in axes[key]:
            if type(v) is not kind:
                raise refuse(key, f"{key} takes {_TYPES[kind]}, not {v!r}")
    options = {key: _as_list(value) for key, value in settings.items() if key not in over}
    for key, values in (axes | options).items():
        if not values:
            raise refuse(key, f"{key} is an empty list: the grid would have no cell")
    axes |= given
    if "dataset" not in axes:
        raise UserError(f"{path}: there is no dataset")
    axes = {key: axes[key] for key in KEYS if key in axes}
    total = math.prod(map(len, (axes | options).values()))
    if total > MOST:
        raise UserError(f"{path}: the grid would have {total} cells, and {MOST} are the most")
    cells = []
    for chosen in itertools.product(*axes.values(), *options.values()):
        values = dict(zip([*axes, *options], chosen))
        try:
            cells.append(make_cell({k: values[k] for k in axes}, {k: values[k] for k in options} | over, data_dir))
        except UserError as error:
            problem = str(error).removeprefix("--set ")
            named = {m.start(): key for key in values if (m := re.search(rf"\b{re.escape(key)}\b", problem))}
            raise refuse(named[min(named)] if named else "", problem) from None
    return cells


_TYPES = {int: "whole numbers", float: "numbers", str: "words"}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_data(cells: list[Cell]) -> None:
    """Refuse now what every worker would refuse of the large sets, which are not opened before; and download once."""
    large = [cell for cell in cells if cell.run.dataset in paper.ACCURACY]
    for (name, data_dir), same in _by(large, "dataset_name", "data_dir").items():
        dataset = load(name, data_dir)
        for split, subset, eta, mu, convention in _by(same, "split_kind", "subset", "eta", "mu", "convention"):
            make_sets(dataset, split or default_split(dataset), subset, eta, mu, convention, seed=0)


def _by(cells: list[Cell], *keys: str) -> dict[tuple[Any, ...], list[Cell]]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.arguments[key] for key in keys), []).append(cell)
    return groups


def state_of(folder: Path) -> str:
    """A damaged result is none: it is made again from the last epoch."""
    for name, state in (("result.json", "done"), ("error.json", "failed"), ("config.json", "begun")):
        with contextlib.suppress(UserError):
            if (folder / name).exists() and (name != "result.json" or read_json(folder / name)):
                return state
    return "to do"


def epochs_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def bench(args: argparse.Namespace) -> None:
    """`urrl bench`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}")
    if args.seeds is not None and not 1 <= args.seeds <= MOST:
        raise UserError(f"--seeds must be from 1 to {MOST}, not {args.seeds}")
    if args.engine not in ENGINES:
        raise UserError(f"--engine must be one of {', '.join(ENGINES)}, not {args.engine!r}")
    threads = args.threads or max(1, cores // args.jobs)
    methods = list(METHODS) if args.methods == "all" else _names(args.methods)
    options = {
        "method": methods and [method_name(name) for name in methods],
        "dataset": _names(args.datasets),
        "seed": args.seeds and list(range(args.seeds)),
        **{key: None if (v := getattr(args, key)) is None else [v] for key in ("recipe", "subset", "epochs")},
    }
    given = {key: value for key, value in options.items() if value is not None}
    cells = read_grid(args.grid, given, args.data_dir, parse_settings(args.settings))
    states = {cell.name: state_of(args.out / cell.name) for cell in cells}
    if args.retry_failed:
        states = {name: "begun" if state == "failed" else state for name, state in states.items()}
    open_cells = [cell for cell in cells if states[cell.name] in ("to do", "begun")]
    check_data(open_cells)
    if args.dry_run:
        from urrl.estimate import dry_run

        dry_run(cells, states, args.out, args.jobs, threads, args.device)
        return
    engine = ENGINES[args.engine](args.out, threads, args.device) if open_cells else None
    plan = {"grid": args.grid, "cells": [{"folder": cell.name, **cell.run.to_dict()} for cell in cells]}
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:10]
    (args.out / "grids").mkdir(parents=True, exist_ok=True)
    write_json(args.out / "grids" / f"{digest}.json", plan)  # so that a report knows what is missing
    for cell in open_cells:
        (args.out / cell.name / "error.json").unlink(missing_ok=True)

    def job(cell: Cell) -> dict[str, Any]:
        return {"out": str(args.out.absolute()), "name": cell.name, "arguments": cell.arguments, "threads": threads,
                "device": args.device}  # fmt: skip

    before = Counter(states.values())
    if engine is not None:
        with View(open_cells, args.out, args.quiet) as view:
            run_cells(open_cells, args.out, engine, args.jobs, view, job)
    after = Counter(state_of(args.out / cell.name) for cell in cells)
    print(f"{len(cells)} cells: {after['done']} done ({before['done']} of them before)" +
          "".join(f", {after[state]} {state}" for state in ("failed", "begun", "to do") if after[state]))  # fmt: skip
    for cell in cells:
        if (path := args.out / cell.name / "error.json").exists():
            print(f"{cell.name}: {read_json(path)['error']}", file=sys.stderr)
    print(f"next: urrl report {args.out}")
    if after["done"] < len(cells):
        print("urrl: the grid is not complete: the same command goes on with what was begun, --retry-failed with what "
              "failed", file=sys.stderr)  # fmt: skip
        sys.exit(1)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def run_cells(cells: list[Cell], out: Path, engine: Engine, jobs: int, view: View, job: Any) -> None:
    """Give the engine `jobs` cells at a time until each is done or failed, here or in another grid's hands."""
    waiting, running = deque(cells), list[tuple[Cell, Any]]()
    deaths: Counter[str] = Counter()
    try:
        while waiting or running:
            for _ in range(len(waiting)):
                if len(running) >= jobs:
                    break
                cell = waiting.popleft()
                if state_of(out / cell.name) in ("done", "failed"):
                    view.ended(cell, "by another process")
                elif _taken(out / cell.name):
                    waiting.append(cell)
                else:
                    running.append((cell, engine.submit(job(cell))))
            for cell, handle in list(running):
                if (answer := engine.poll(handle)) is None:
                    continue
                running.remove((cell, handle))
                if answer == "busy":
                    waiting.append(cell)
                elif answer.startswith("died"):
                    deaths[cell.name] += 1
                    again = deaths[cell.name] <= DEATHS
                    view.say(f"{cell.name}: the worker {answer}; " +
                             ("it goes on from its last epoch later" if again else "left as it is"))  # fmt: skip
                    waiting.extend([cell] if again else [])
                else:
                    view.ended(cell, answer)
            view.update([cell for cell, _ in running])
            time.sleep(0.05 if running else 0.5)
    finally:
        engine.close()


def _taken(folder: Path) -> bool:
    try:
        with locked(folder / "config.json"):
            return False
    except FileNotFoundError:
        return False
    except Busy:
        return True


class View:
    """Progress over the whole grid, in epochs: bars on a terminal, elsewhere a line for each cell that ends."""

    def __init__(self, cells: list[Cell], out: Path, quiet: bool):
        self.out, self.quiet = out, quiet
        self.cells, self.finished = len(cells), 0
        self.epochs = {cell.name: cell.run.training.epochs for cell in cells}
        self.at_start = {name: min(epochs_done(out / name), self.epochs[name]) for name in self.epochs}
        self.now = dict(self.at_start)
        self.began = time.monotonic()
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self.bar = Progress("{task.description}", BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
                                TextColumn("{task.fields[note]}"), console=Console(stderr=True))  # fmt: skip
            self.overall = self.bar.add_task("all", total=max(1, sum(self.epochs.values())), note="")
            self.tasks: dict[str, Any] = {}

    def __enter__(self) -> View:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def left(self) -> str:
        """What the rest will take, by the epochs done so far."""
        done = sum(self.now.values()) - sum(self.at_start.values())
        rest = sum(self.epochs.values()) - sum(self.now.values())
        return clock((time.monotonic() - self.began) / done * rest) if done else "?"

    def update(self, running: list[Cell]) -> None:
        for cell in running:
            self.now[cell.name] = min(epochs_done(self.out / cell.name), self.epochs[cell.name])
        if not self.bar:
            return
        for name in set(self.tasks) - {cell.name for cell in running}:
            self.bar.remove_task(self.tasks.pop(name))
        for cell in running:
            if cell.name not in self.tasks:
                self.tasks[cell.name] = self.bar.add_task(cell.name, total=self.epochs[cell.name], note="")
            now, total = self.now[cell.name], self.epochs[cell.name]
            self.bar.update(self.tasks[cell.name], completed=now, note=f"epoch {min(now + 1, total)}/{total}")
        note = f"{self.finished}/{self.cells} cells, {self.left()} left"
        self.bar.update(self.overall, completed=sum(self.now.values()), note=note)

    def ended(self, cell: Cell, answer: str) -> None:
        self.finished += 1
        self.now[cell.name] = self.epochs[cell.name]  # also where it stopped early
        folder = self.out / cell.name
        if state_of(folder) == "done":
            result = read_json(folder / "result.json")
            known = "trained" if result["test_accuracy"] is None else f"{result['test_accuracy']:.2%}"
            figure = f"{known} in {clock(result['seconds'])}"
        else:
            figure = "failed"
        note = "" if answer in ("done", "failed") else f" ({answer})"
        self.say(f"{self.finished}/{self.cells} {cell.name}  {figure}{note}  {self.left()} left", self.quiet)

    def say(self, line: str, quiet: bool = False) -> None:
        if self.bar:
            self.bar.console.print(line, highlight=False, markup=False)
        elif not quiet:
            print(line, file=sys.stderr, flush=True)
