"""What a second process gains, and what processes send one another.

two_processes:  items a second of `urrl train` under torchrun with two processes over those with one, one thread each,
                the same global batch. The runs alternate; the median of the ratios counts.
bytes:          counted in real jobs of two processes, by kind; with them the times of 8 to 64 GPUs are modelled.

    python benchmarks/scaling.py [--repeats 5] [--subset 6000] [--epochs 2] [--batch-size 256] [--data-dir D]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from urrl import distributed
from urrl.data import Dataset
from urrl.methods.base import Method
from urrl.run import make_run, train

# The model's assumptions.
GPU = 20e12  # operations a second that a GPU does in these networks
IN_NODE, BETWEEN = 150e9, 12.5e9  # bytes a second: NVLink; one link of 100 Gbit/s a node
LATENCY = 20e-6  # seconds, of a collective, and as much again for each doubling of the processes
GPUS_A_NODE = 8


def torchrun(processes: int, *command: object) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *map(str, command)], env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def throughput(processes: int, data: list[str], subset: int, epochs: int, batch: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        torchrun(processes, "-m", "urrl", "train", "--dataset", "fmnist", *data, "--subset", subset, "--epochs", epochs,
                 "--set", f"batch_size={batch}", "--threads", 1, "--device", "cpu", "--quiet", "--out", f"{folder}/run",
                 )  # fmt: skip
        return float(json.loads(Path(folder, "run", "result.json").read_text())["samples_per_second"])


# ---- bytes -------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # recipe, settings: small batches, because the bytes go by the row
    "fast net, one view": ("fast", {"batch_size": 32, "one_view": "weak", "alpha": 1.0}),
    "PreAct ResNet-18, the paper's": ("paper", {"batch_size": 16}),
}


def count(case: str) -> None:
    """In a job of two: bytes by (step or epoch, collective), as a line of JSON."""
    from unittest import mock

    import torch

    recipe, settings = CASES[case]
    moved: Counter[str] = Counter()
    phase = "epoch"

    def in_step(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal phase
            phase = "step"
            result = function(*arguments, **options)
            phase = "epoch"
            return result

        return wrapped

    def call(collective: Callable[..., Any], *arguments: Any, good: Callable[..., Any] = distributed._call,
             **options: Any) -> None:  # fmt: skip
        name = collective.__name__
        tensor = arguments[0] if name in ("all_reduce", "broadcast") else arguments[1] if len(arguments) > 1 else None
        received = name == "broadcast" and arguments[1] != distributed.rank()
        if isinstance(tensor, torch.Tensor) and not received:
            moved[f"{phase} {name}"] += tensor.nbytes
        good(collective, *arguments, **options)

    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (96, 3, 32, 32), dtype=torch.uint8, generator=rng)
    pixels = Dataset("cifar10", x, torch.arange(96) % 10, tuple("0123456789"), 0, "cifar")
    with (
        mock.patch.dict("urrl.data.DATASETS", cifar10=lambda folder: pixels),
        mock.patch.object(distributed, "_call", call),
        mock.patch.object(Method, "forward_views", in_step(Method.forward_views)),
        mock.patch("urrl.methods.urrl.partners", in_step(distributed.partners)),
        mock.patch.object(distributed, "sum_gradients", in_step(distributed.sum_gradients)),
        tempfile.TemporaryDirectory() as folder,
        distributed.job(),
    ):
        cell = make_run("cifar10", "urrl", recipe, {**settings, "epochs": 1}, eta=0.3, mu=0.3, seed=0)
        result = train(*cell, Path(folder, str(distributed.rank())), device="cpu")
        if distributed.rank() == 0:
            n, steps = result["n_train"], -(-result["n_train"] // settings["batch_size"])
            print(json.dumps({
                "gradients": moved["step all_reduce"] / steps,  # a step
                "outputs": 2 * moved["step all_gather"] / n,  # an item: two processes, each with half of the rows
                "partners": 2 * moved["step all_to_all_single"] / n,  # an item
                "epoch": 2 * (moved["epoch all_gather"] + moved["epoch broadcast"]) / n,  # an item and epoch
                "flops": result["train_flops"] / n,  # an item and epoch
            }))  # fmt: skip


# ---- model -------------------------------------------------------------------------------------------------


def ring(gpus: int, moved: float) -> float:
    """Seconds for what passes through every GPU."""
    return (gpus - 1) / gpus * moved / (IN_NODE if gpus <= GPUS_A_NODE else BETWEEN)


def table(case: str, moved: dict[str, float]) -> None:
    item = ", ".join(f"{moved[kind]:.0f} of {kind}" for kind in ("outputs", "partners"))
    print(f"\n{case}: {moved['gradients'] / 1e6:.2f} MB of gradients a step; bytes an item: {item} a step, "
          f"{moved['epoch']:.0f} an epoch")  # fmt: skip
    print(f"{'GPUs':>6}{'batch':>8}{'compute':>12}{'exchange':>12}{'efficiency':>12}")
    for batch in (lambda gpus: 256, lambda gpus: 256 * gpus):
        for gpus in (8, 16, 32, 64):
            rows = batch(gpus)
            compute = moved["flops"] * rows / gpus / GPU
            exchange = ring(gpus, 2 * moved["gradients"] + moved["outputs"] * rows + moved["partners"] * rows / gpus)
            exchange += 3 * LATENCY * (1 + (gpus - 1).bit_length())  # one after the other, none behind the computing
            exchange += ring(gpus, moved["epoch"] * rows)  # the epoch's part, spread over its steps
            print(f"{gpus:>6}{rows:>8}{1000 * compute:>9.2f} ms{1000 * exchange:>9.2f} ms"
                  f"{compute / (compute + exchange):>12.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--subset", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together (default %(default)s)")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--count", metavar="CASE", help=argparse.SUPPRESS)  # what the jobs below are started with
    args = parser.parse_args()
    if args.count:
        count(args.count)
        return
    for case in CASES:
        table(case, json.loads(torchrun(2, Path(__file__), "--count", case).splitlines()[-1]))
    data = ["--data-dir", str(args.data_dir)] if args.data_dir else []
    pairs = []
    print(f"\n{'one':>10}{'two':>10}{'ratio':>10}   items a second, F-MNIST, one thread a process")
    for _ in range(args.repeats):
        one, two = (throughput(processes, data, args.subset, args.epochs, args.batch_size) for processes in (1, 2))
        pairs.append((one, two))
        print(f"{one:>10.0f}{two:>10.0f}{two / one:>10.3f}", flush=True)
    print(json.dumps({"two_processes": round(statistics.median(two / one for one, two in pairs), 3)}))


if __name__ == "__main__":
    main()
