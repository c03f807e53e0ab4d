"""Items a second of a run whose images are streamed from the disk over those of the same run on a tensor of them.

The images are written as PNG into a temporary folder, tar and parquet shards; the runs alternate, and the median of the
ratios counts. Streaming has one worker, training one thread: as many as there are on two cores.

    python benchmarks/stream.py [--items 3000] [--epochs 2] [--repeats 3] [--data-dir D]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from urrl.candidates import generate
from urrl.data import load
from urrl.data.own import from_arrays
from urrl.data.stream import from_files, from_parquet, from_tar
from urrl.run import make_own_run, train


def write(images: list[bytes], folder: Path) -> dict[str, Any]:
    """The same images in each form."""
    paths = [folder / f"{i:05}.png" for i in range(len(images))]
    with tarfile.open(folder / "images.tar", "w") as tar:
        for path, image in zip(paths, images):
            path.write_bytes(image)
            tar.add(path, path.name)
    pq.write_table(pa.table({"image": images}), folder / "images.parquet", row_group_size=100)
    size = (1, 28, 28)
    return {
        "files": from_files(paths, size, workers=1),
        "tar": from_tar([folder / "images.tar"], size, workers=1),
        "parquet": from_parquet([folder / "images.parquet"], "image", size, workers=1),
    }


def png(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.numpy()).save(buffer, "png")
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load("fmnist", args.data_dir)
    x, y = data.x[: args.items, 0], data.truth[: args.items]
    S = generate(y, 10, 0.3, 0.3).mask

    def speed(items: Any) -> float:
        own = from_arrays(items, S, data.classes, y, augment="fmnist")
        run, splits, sets = make_own_run(own, "urrl", {"epochs": args.epochs, "batch_size": 256, "width": 16}, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            return float(train(run, own, splits, sets, Path(folder) / "run", device="cpu")["samples_per_second"])

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        streams = write([png(image) for image in x], Path(folder))
        print(f"{'':<10}{'memory':>10}{'streamed':>10}{'ratio':>10}   items a second")
        for name, items in streams.items():
            pairs = [(speed(x), speed(items)) for _ in range(args.repeats)]
            memory, streamed = (statistics.median(column) for column in zip(*pairs))
            figures[f"stream_{name}"] = statistics.median(b / a for a, b in pairs)
            print(f"{name:<10}{memory:>10.0f}{streamed:>10.0f}{figures[f'stream_{name}']:>10.3f}", flush=True)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
