"""A grid of 40 tiny runs, killed three times with -9 at random moments and started again, against one that nobody
disturbed: no run lost, none done twice, the same results.

    python benchmarks/grid_torture.py [SEED]
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GRID = """
dataset = "digits"
method = ["urrl", "proden"]
mu = [0.1, 0.2, 0.3, 0.4]
seed = [0, 1, 2, 3, 4]
epochs = 3
subset = 200
set.width = 4
set.batch_size = 20
"""
KILLS, RUNS = 3, 40


def start(folder: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "urrl", "bench", str(folder / "grid.toml"), "--out", str(out), "--jobs", "2"]
    return subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Of every run, without what the clock says."""
    found = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/result.json")}
    clock = ("seconds", "samples_per_second", "date")
    return {name: {k: v for k, v in result.items() if k not in clock} for name, result in found.items()}


def written(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**6)
    rng = random.Random(seed)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "grid.toml").write_text(GRID)
        began = time.monotonic()
        assert start(folder, folder / "whole").wait() == 0
        seconds = time.monotonic() - began
        whole = results(folder / "whole")
        assert len(whole) == RUNS
        print(f"undisturbed: {RUNS} runs in {seconds:.0f} s")
        done: dict[Path, int] = {}
        for kill in range(KILLS):
            process = start(folder, folder / "killed")
            time.sleep(rng.uniform(0.15, 0.45) * seconds)
            if process.poll() is not None:
                sys.exit("the grid ended before it could be killed: the machine has become faster meanwhile")
            process.kill()
            process.wait()
            time.sleep(1)
            now = written(folder / "killed")
            assert all(now.get(path) == stamp for path, stamp in done.items()), "a finished run was touched"
            done = now
            print(f"kill {kill + 1}: {len(done)} runs were done")
        assert start(folder, folder / "killed").wait() == 0
        now = written(folder / "killed")
        assert all(now[path] == stamp for path, stamp in done.items()), "a finished run was touched"
        assert results(folder / "killed") == whole, "the results differ"
        print(f"{len(now)} runs, none lost, none done twice, all results the same")


if __name__ == "__main__":
    main()
