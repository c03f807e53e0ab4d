"""What a grid would cost, before it is run."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from urrl.bench import Cell, epochs_done
from urrl.data import load, split
from urrl.files import read_json
from urrl.nets import build_network
from urrl.progress import clock
from urrl.run import make_run, pick_device, train
from urrl.train import read_history, scouted

TINY = 32  # items of the runs that are counted


def dry_run(cells: list[Cell], states: dict[str, str], out: Path, jobs: int, threads: int, device: str) -> None:
    """Print every cell with its state, operations and time."""
    torch.set_num_threads(min(threads, os.cpu_count() or 1))
    costs: dict[str, tuple[float, float]] = {}  # of a kind of run: FLOPs and seconds
    for cell in cells:
        if states[cell.name] == "done":
            result = read_json(out / cell.name / "result.json")
            costs[_kind(cell)] = (result["train_flops"], result["seconds"])
    speeds: dict[tuple[str, str, int], float] = {}
    total_flops = total_seconds = 0.0
    for cell in cells:
        if (kind := _kind(cell)) not in costs:
            net = (cell.run.dataset, cell.run.training.net, cell.run.training.width)
            if net not in speeds:
                speeds[net] = speed(cell, device)
            counted = count_flops(cell)
            costs[kind] = (counted, counted / speeds[net])
        flops, seconds = costs[kind]
        state, share = states[cell.name], 1.0
        if state == "begun":
            done = epochs_done(out / cell.name)
            share = 1 - done / cell.run.training.epochs
            state = f"begun, {done} of {cell.run.training.epochs} epochs"
        if state not in ("done", "failed"):
            total_flops, total_seconds = total_flops + share * flops, total_seconds + share * seconds
        print(f"{cell.name}  {flops:.2g} FLOPs  {clock(seconds)}  {state}")
    count = ", ".join(f"{n} {state}" for state, n in Counter(states.values()).items())
    placed = f"{jobs} job{'s' * (jobs > 1)} of {threads} thread{'s' * (threads > 1)}"
    print(f"{len(cells)} cells ({count}); left: {total_flops:.3g} FLOPs, {clock(total_seconds / jobs)} with {placed}")
    print(f"""FLOPs: of a finished run with other rates or seed where there is one, else of two epochs of {TINY} items,
scaled up, which leaves out what grows with the square of the items. Time: of the finished run, else by a step of the
bare network, timed now.""")


def _kind(cell: Cell) -> str:
    """Runs that differ in rates, convention and seed alone cost the same."""
    config = {key: value for key, value in cell.run.to_dict().items() if key not in ("eta", "mu", "convention", "seed")}
    return json.dumps(config, sort_keys=True)


def count_flops(cell: Cell) -> float:
    """Of the whole run, from two epochs on very few items."""
    a = cell.arguments
    items = cell.run.subset or len(split(load(a["dataset_name"], a["data_dir"]), cell.run.split, 0).train)
    tiny = a | {"subset": TINY, "settings": a["settings"] | {"epochs": 2, "lr": 0.0}, "candidates": None}
    run, dataset, splits, sets = make_run(**tiny)
    with tempfile.TemporaryDirectory() as folder:
        splits = dataclasses.replace(splits, test=splits.val)
        result = train(run, dataset, splits, sets, Path(folder) / "run", device="cpu")
        first, both = (record["flops"] for record in read_history(Path(folder) / "run", print))
    epochs = cell.run.training.epochs
    early = scouted(cell.run.training) or epochs / 2  # epochs like the first one; the others are like the second
    return (first * early + (both - first) * (epochs - early)) / result["n_train"] * items


def speed(cell: Cell, device: str) -> float:
    """FLOPs a second of a forward and backward of the bare network."""
    t = cell.run.training
    dataset = load(cell.arguments["dataset_name"], cell.arguments["data_dir"])
    shape = tuple(dataset.x.shape[1:])
    net = build_network(t.net, shape, len(dataset.classes), t.width, t.embed_dim, t.head, t.members).to(
        pick_device(device)
    )
    x = torch.randn(min(t.batch_size, 64), *shape, device=next(net.parameters()).device)
    if len(shape) == 3:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore
    with FlopCounterMode(display=False) as counter:  # and warm up
        net(x).logits.sum().backward()
    began = time.perf_counter()
    for _ in range(2):
        net(x).logits.sum().backward()
    float(next(net.parameters()).detach().sum())  # waits for a device that works by itself
    return 2 * counter.get_total_flops() / (time.perf_counter() - began)
