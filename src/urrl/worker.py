"""One run of a grid, wherever it is placed. `python -m urrl.worker` is a process of the local engine: a job is a line
of JSON on its input, the answer a word on its output; when the input ends, the grid is gone, and so is the worker."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


def work(job: dict[str, Any]) -> str:
    """Do the run `name` in the folder `out`: "done", "failed" (error.json says why) or "busy" (in other hands)."""
    import torch

    from urrl.allocator import keep_memory
    from urrl.errors import Busy, one_line
    from urrl.files import write_json, write_text
    from urrl.run import make_run, train

    out, name = Path(job["out"]), job["name"]
    keep_memory()
    try:
        torch.set_num_threads(job["threads"])
        run, dataset, splits, sets = make_run(**job["arguments"])
        train(run, dataset, splits, sets, out / name, resume=True, device=job["device"])
    except Busy:
        return "busy"
    except Exception as error:
        log = out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        write_text(log, traceback.format_exc())
        (out / name).mkdir(exist_ok=True)
        write_json(
            out / name / "error.json",
            {"error": f"{type(error).__name__}: {one_line(error)}", "log": str(log.relative_to(out))},
        )
        return "failed"
    return "done"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)  # in the middle of whatever is going on: a run's folder stands that

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(work(jobs.get()), file=answers, flush=True)


if __name__ == "__main__":
    main()
