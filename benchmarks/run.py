"""All ratio benchmarks in a row, next to the committed ratios. Warns where one got worse; never fails.

python benchmarks/run.py [--update]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMMITTED = HERE / "ratios.json"
SCRIPTS = ("step.py", "knn.py", "augment.py", "memory.py", "methods.py", "scaling.py", "stream.py")
HIGHER_IS_BETTER = ("_over_pil", "agreement", "two_processes", "stream_files", "stream_tar", "stream_parquet")
TOLERANCE = 1.15  # machines are noisy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the measured ratios as the committed ones")
    args = parser.parse_args()
    measured: dict[str, float] = {}
    for script in SCRIPTS:
        print(f"\n== {script}", flush=True)
        done = subprocess.run([sys.executable, HERE / script], capture_output=True, text=True)
        print(done.stdout.rstrip() if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1]}")
        if done.returncode == 0:
            measured |= json.loads(done.stdout.splitlines()[-1])
    ratios = {k: v for k, v in measured.items() if not k.endswith(("_seconds", "_per_second"))}
    if args.update:
        COMMITTED.write_text(json.dumps(ratios, indent=2) + "\n")
        return
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    worse = []
    for name, value in ratios.items():
        if name in committed:
            change = committed[name] / value if name.endswith(HIGHER_IS_BETTER) else value / committed[name]
            if change > TOLERANCE:
                worse.append(f"warning: {name} is {value}, was {committed[name]}")
    print("\n" + ("\n".join(worse) or "no ratio got worse than the committed ones"))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
